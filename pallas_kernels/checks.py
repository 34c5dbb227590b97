"""Checks the arguments of the operations on table rows, and compares kernels with references."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Kernel

LANES = 128
"""Number of lanes (TPU) or threads (GPU) that move a row together."""


def refuse_rows(
    values: jax.Array, others: tuple[jax.Array | None, ...], kernel: Kernel
) -> str | None:
    """None, or why no kernel accepts the table `values` together with these arrays."""
    if kernel != "gpu" and values.dtype == jnp.bfloat16:
        # In a bfloat16 table two neighbouring rows share 32-bit words of a tile.
        return "bfloat16 tables"
    if values.dtype not in (jnp.float32, jnp.bfloat16):
        return f"{values.dtype} tables"
    for array in others:
        if array is not None and array.dtype != jnp.float32:
            return f"{array.dtype} arrays beside the table"
    if values.shape[-1] % LANES and not dispatch.interpreted():
        # Only devices have this limit; interpreted kernels run at the widths of small tests.
        return f"rows of {values.shape[-1]} values, only multiples of {LANES}"
    return None


def assert_results_agree(op: Callable[..., Any], arrays: dict[str, Any], *, ratio: float) -> None:
    """Compares the results and cotangents of an operation's kernel with those of its reference.

    Raises:
      AssertionError: a result differs by more than `ratio` of its norm; the message names it.
    """
    for name, error in result_errors(op, arrays).items():
        if not error <= ratio:
            raise AssertionError(f"{name} differs by {error:.2g} of its norm, at most {ratio:g}")


def result_errors(op: Callable[..., Any], arrays: dict[str, Any]) -> dict[str, float]:
    """Differences of an operation's kernel from its reference, relative to each array's norm.

    Args:
      op: function of the arrays and `backend` that returns a pytree of arrays.
      arrays: arguments by name; cotangents of the float arrays are compared as well.
    """
    results = results_of(op, arrays)
    return relative_errors(results("pallas"), results("reference"))


def results_of(
    op: Callable[..., Any], arrays: dict[str, Any], *, fixed: Sequence[str] = ()
) -> Callable[[dispatch.Backend], Any]:
    """A compiled function from a backend to the operation's results and cotangents.

    Args:
      op: function of the arrays and `backend` that returns a pytree of float arrays.
      arrays: arguments by name.
      fixed: names of float arrays without cotangents.
    """
    moving = {name: x for name, x in arrays.items() if _is_float(x) and name not in fixed}
    others = {name: x for name, x in arrays.items() if name not in moving}

    @functools.partial(jax.jit, static_argnums=0)
    def results(backend: dispatch.Backend, moving: Any, others: Any) -> Any:
        outputs, pull = jax.vjp(lambda moving: op(**moving, **others, backend=backend), moving)
        return outputs, pull(outputs)

    return lambda backend: results(backend, moving, others)


def relative_errors(actual: Any, expected: Any) -> dict[str, float]:
    """The norm of each leaf's difference divided by the norm of the expected leaf, by path."""

    @jax.jit
    def errors(actual: Any, expected: Any) -> Any:
        def error(a: jax.Array, e: jax.Array) -> jax.Array:
            a, e = (x.astype(jnp.float32).ravel() for x in (a, e))
            return jnp.linalg.norm(a - e) / jnp.linalg.norm(e)

        return jax.tree.map(error, actual, expected)

    return {
        jax.tree_util.keystr(path): float(error)
        for path, error in jax.tree_util.tree_leaves_with_path(errors(actual, expected))
    }


def _is_float(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
