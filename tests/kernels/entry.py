"""The description of an operation for the shared tests."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Kernel
from pallas_kernels.spec import Comparison, Spec


def equal_or_close(actual: Any, expected: Any, *, ratio: float) -> None:
    """Integers equal; floats within `ratio` of the expected array's norm, named by their path."""
    jax.tree.map_with_path(functools.partial(_compare_leaf, ratio=ratio), expected, actual)


def _compare_leaf(path: Any, expected: Any, actual: Any, *, ratio: float) -> None:
    name = jax.tree_util.keystr(path)
    expected, actual = np.asarray(expected), np.asarray(actual)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    if not np.issubdtype(expected.dtype, np.floating):
        np.testing.assert_array_equal(actual, expected, err_msg=name)
        return
    error = np.linalg.norm((actual - expected).astype(np.float64).ravel())
    norm = np.linalg.norm(expected.astype(np.float64).ravel())
    assert error <= ratio * norm, f"{name}: error {error:.3g} exceeds {ratio:g} of {norm:.3g}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An operation under test; `tests/kernels/entries.py` has all of them."""

    op: str
    specs: Sequence[Spec]
    sample: Callable[[Any, Any], dict[str, Any]]
    """`sample(spec, dtype)`: the arrays of one call, by argument name."""
    call: Callable[..., Any]
    """`call(spec, backend, **arrays)`: the public function, results as a pytree."""
    differentiable: tuple[str, ...]
    """Arrays that the VJP is compared for."""
    kernels: tuple[Kernel, ...] = ("tpu", "gpu")
    ratio: float = 1e-6
    """Largest error of an output relative to its norm."""
    vjp_ratio: float = 1e-5
    """Largest error of a cotangent relative to its norm."""
    outputs_have_kernels: bool = True
    """Whether a kernel makes the outputs; else only the VJP is compiled ahead of time."""
    vjp_has_kernels: bool = True
    """Whether the VJP runs kernels that no operation's outputs run, so that compiling it ahead of
    time says more. XLA's own part, sorts above all, compiles ten times as long as a kernel."""
    compare: Callable[[Any, Any], None] | None = None
    """Compares outputs in place of `equal_or_close`, for example where ties may break otherwise."""
    compare_cotangents: Callable[[Any, Any], None] | None = None
    not_interpreted: Callable[[Kernel, Any], str | None] = lambda kernel, spec: None
    """Why a kernel cannot be interpreted here (a primitive that this JAX's interpreter lacks)."""

    def outputs(self, spec: Spec, backend: str, arrays: dict[str, Any]) -> Any:
        return jax.jit(lambda arrays: self.call(spec, backend, **arrays))(arrays)

    def cotangents(self, spec: Spec, backend: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Cotangents of the differentiable arrays for fixed ones of all float outputs."""
        return self.outputs_and_cotangents(spec, backend, arrays)[1]

    def outputs_and_cotangents(
        self, spec: Spec, backend: str, arrays: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Both from one compilation."""
        moving = {name: arrays[name] for name in self.differentiable}

        def call(moving, fixed):
            outputs = self.call(spec, backend, **{**fixed, **moving})
            total = jnp.zeros((), jnp.float32)
            for leaf in jax.tree.leaves(outputs):
                if jnp.issubdtype(leaf.dtype, jnp.floating):
                    # Computed, not a constant: a table's would be half a gigabyte of program.
                    phases = jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape)
                    direction = jnp.cos(0.7 * phases + 1.0).astype(leaf.dtype)
                    total += jnp.sum(leaf * direction).astype(jnp.float32)
            return total, outputs

        cotangents, outputs = jax.jit(jax.grad(call, has_aux=True))(moving, arrays)
        return outputs, cotangents

    def assert_outputs(self, actual: Any, expected: Any) -> None:
        if self.compare is not None:
            self.compare(actual, expected)
        else:
            equal_or_close(actual, expected, ratio=self.ratio)

    def assert_cotangents(self, actual: dict[str, Any], expected: dict[str, Any]) -> None:
        if self.compare_cotangents is not None:
            self.compare_cotangents(actual, expected)
        else:
            equal_or_close(actual, expected, ratio=self.vjp_ratio)


def compared(comparison: Comparison) -> dict[str, Any]:
    """The fields of an entry that are compared as before a kernel's first use."""

    def call(spec, backend, **arrays):
        return comparison.call(spec, jnp.float32, **arrays, backend=backend)

    return {"specs": comparison.specs, "sample": comparison.sample, "call": call}


def interpreted_only(**specs):
    """Leaves all but some specs to the devices.

    Interpreting takes a second or more per case, and on the GPU's side a millisecond per load (it
    calls back to Python): those named here take every branch of the kernels.
    """

    def not_interpreted(kernel, spec):
        if spec.name in specs[kernel]:
            return None
        return f"other specs interpret the same branches on the {kernel}'s side"

    return not_interpreted


@contextlib.contextmanager
def checked_again():
    """Clears the records of checked kernels and logged lines, and restores them afterwards.

    Inside, each kernel is compared with the reference again before its first use.
    """
    with mock.patch.dict(dispatch._checked, clear=True):
        logged = {*dispatch._logged}
        dispatch._logged.clear()
        try:
            yield
        finally:
            dispatch._logged.clear()
            dispatch._logged.update(logged)


def equations(jaxpr):
    """Every equation, those of inner programs included, kernels' bodies too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def programs(jaxpr, name):
    """The inner compiled functions of this name, the same object where one trace is shared."""
    return [
        equation.params["jaxpr"].jaxpr
        for equation in equations(jaxpr)
        if equation.params.get("name") == name
    ]
