"""Compares kernels with plain JAX: differences of results and cotangents, relative to norms."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch


def require(errors: dict[str, float], ratio: float, case: str) -> None:
    """Raises AssertionError if an error exceeds `ratio` or is NaN; the message names it."""
    for name, error in errors.items():
        if not error <= ratio:
            raise AssertionError(
                f"{name} differs by {error:.2g} of its norm, at most {ratio:g} ({case})"
            )


def result_errors(
    op: Callable[..., Any], arrays: dict[str, Any], *, fixed: Sequence[str] = ()
) -> dict[str, float]:
    """Differences of an operation's kernel from its reference, relative to each array's norm.

    Args: as `results_of`.
    """
    results = results_of(op, arrays, fixed=fixed)
    return relative_errors(results("pallas"), results("reference"))


def results_of(
    op: Callable[..., Any], arrays: dict[str, Any], *, fixed: Sequence[str] = ()
) -> Callable[[dispatch.AnyBackend], Any]:
    """A compiled function from a backend to the operation's results and cotangents.

    Args:
      op: function of the arrays and `backend` that returns a pytree of float arrays.
      fixed: names of float arrays without cotangents.
    """
    moving = {
        name: x
        for name, x in arrays.items()
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) and name not in fixed
    }
    others = {name: x for name, x in arrays.items() if name not in moving}

    @functools.partial(jax.jit, static_argnums=0)
    def results(backend: dispatch.AnyBackend, moving: Any, others: Any) -> Any:
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
