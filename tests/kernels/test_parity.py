"""Every kernel of every operation on every named shape: outputs and VJP equal the reference's.

Kernels are interpreted here on a CPU at small sizes; under the marks `gpu` and `tpu` they run for
real at all sizes: `JAX_PLATFORMS=cuda python -m pytest -n 0 -m gpu tests/kernels`.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from tests.kernels.entry import entries, equal_or_close

INTERPRETED = [
    pytest.param(entry, kernel, spec, id=f"{entry.op}-{kernel}-{spec.name}")
    for entry in entries()
    for kernel in entry.kernels
    for spec in entry.specs
    if spec.small
]
ON_DEVICE = [
    pytest.param(
        entry, kernel, spec, id=f"{entry.op}-{spec.name}", marks=getattr(pytest.mark, kernel)
    )
    for entry in entries()
    for kernel in entry.kernels
    for spec in entry.specs
]


@pytest.fixture(autouse=True)
def _strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def interpreting(entry, kernel, spec):
    reason = entry.not_interpreted(kernel, spec)
    if reason is not None:
        pytest.skip(reason)
    return dispatch.interpret_kernels(kernel)


def require(kernel):
    if jax.default_backend() != kernel:
        pytest.skip(f"runs on a {kernel} only; this is a {jax.default_backend()}")


@pytest.mark.parametrize(("entry", "kernel", "spec"), INTERPRETED)
def test_interpreted_outputs_equal_the_reference(entry, kernel, spec):
    with interpreting(entry, kernel, spec):
        arrays = entry.sample(spec, jnp.float32)
        actual = entry.outputs(spec, "pallas", arrays)
    entry.assert_outputs(actual, entry.outputs(spec, "reference", arrays))


@pytest.mark.parametrize(("entry", "kernel", "spec"), INTERPRETED)
def test_interpreted_cotangents_equal_the_reference(entry, kernel, spec):
    if not entry.differentiable:
        pytest.skip(f"{entry.op} is not differentiable")
    with interpreting(entry, kernel, spec):
        arrays = entry.sample(spec, jnp.float32)
        actual = entry.cotangents(spec, "pallas", arrays)
    expected = entry.cotangents(spec, "reference", arrays)
    equal_or_close(actual, expected, ratio=entry.vjp_ratio)


@pytest.mark.parametrize(("entry", "kernel", "spec"), ON_DEVICE)
def test_outputs_on_the_device_equal_the_reference(entry, kernel, spec):
    require(kernel)
    arrays = entry.sample(spec, jnp.float32)
    actual = entry.outputs(spec, "pallas", arrays)
    entry.assert_outputs(actual, entry.outputs(spec, "reference", arrays))


@pytest.mark.parametrize(("entry", "kernel", "spec"), ON_DEVICE)
def test_cotangents_on_the_device_equal_the_reference(entry, kernel, spec):
    require(kernel)
    if not entry.differentiable:
        pytest.skip(f"{entry.op} is not differentiable")
    arrays = entry.sample(spec, jnp.float32)
    actual = entry.cotangents(spec, "pallas", arrays)
    expected = entry.cotangents(spec, "reference", arrays)
    equal_or_close(actual, expected, ratio=entry.vjp_ratio)


@pytest.mark.parametrize(("entry", "kernel", "spec"), ON_DEVICE)
def test_two_runs_on_the_device_are_bitwise_equal(entry, kernel, spec):
    require(kernel)
    arrays = entry.sample(spec, jnp.float32)
    equal_or_close(
        entry.outputs(spec, "pallas", arrays), entry.outputs(spec, "pallas", arrays), ratio=0.0
    )
