"""Every kernel of every operation on every named shape: outputs and VJP equal the reference's.

Kernels are interpreted here on a CPU at small sizes; under the marks `gpu` and `tpu` they run for
real at all sizes: `JAX_PLATFORMS=cuda python -m pytest -n 0 -m gpu tests/kernels`.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from tests.kernels.entries import ENTRIES
from tests.kernels.entry import equal_or_close

INTERPRETED = [
    pytest.param(entry, kernel, spec, id=f"{entry.op}-{kernel}-{spec.name}")
    for entry in ENTRIES
    for kernel in entry.kernels
    for spec in entry.specs
    if spec.small
]
ON_DEVICE = [
    pytest.param(
        entry,
        kernel,
        spec,
        id=f"{entry.op}-{kernel}-{spec.name}",
        marks=getattr(pytest.mark, kernel),
    )
    for entry in ENTRIES
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


def times_chosen(kernel):
    return sum(n for (_, chosen, _), n in dispatch.decisions.items() if chosen == kernel)


def on_device(kernel):
    """Runs this kernel, whichever of the device's would be chosen."""
    if jax.default_backend() != kernel:
        pytest.skip(f"runs on a {kernel} only; this is a {jax.default_backend()}")
    lacking = dispatch._device_lacks(kernel)
    if lacking is not None:
        pytest.skip(f"this is {lacking}")
    return dispatch.compile_kernels(kernel)


@pytest.mark.slow_cases(
    "chunk_gated_delta_rule-tpu-strong_writes",
    "cross_entropy-gpu-tiles_and_rest",
    "product_top_k-tpu-ties",
)
@pytest.mark.thorough(
    "slot_add-tpu-distinct",
    "slot_add-tpu-zipf",
    "slot_add-gpu-zipf",
    "slot_dot-tpu-many_places",
    "slot_read-tpu-63_tokens",
    "slot_read-tpu-zipf",
    "slot_read-gpu-zipf",
)
@pytest.mark.parametrize(("entry", "kernel", "spec"), INTERPRETED)
def test_interpreted_kernels_and_their_vjps_equal_the_reference(entry, kernel, spec):
    with interpreting(entry, kernel, spec):
        before = times_chosen(kernel)
        arrays, *expected = sample_and_reference(entry.op, spec.name)
        outputs, cotangents = entry.outputs_and_cotangents(spec, "pallas", arrays)
    assert times_chosen(kernel) > before  # Not another kernel of the same platform.
    assert_equal_to_the_reference(entry, outputs, cotangents, *expected)


@pytest.mark.parametrize(("entry", "kernel", "spec"), ON_DEVICE)
def test_kernels_and_their_vjps_on_the_device_equal_the_reference(entry, kernel, spec):
    with on_device(kernel):
        arrays = entry.sample(spec, jnp.float32)
        outputs, cotangents = entry.outputs_and_cotangents(spec, "pallas", arrays)
    expected = entry.outputs_and_cotangents(spec, "reference", arrays)
    assert_equal_to_the_reference(entry, outputs, cotangents, *expected)


@pytest.mark.parametrize(("entry", "kernel", "spec"), ON_DEVICE)
def test_two_runs_on_the_device_are_bitwise_equal(entry, kernel, spec):
    with on_device(kernel):
        arrays = entry.sample(spec, jnp.float32)
        first, second = (entry.outputs(spec, "pallas", arrays) for _ in range(2))
    equal_or_close(first, second, ratio=0.0)


@functools.cache
def sample_and_reference(op, spec_name):
    """Small arrays, outputs and cotangents, once for all kernels of an operation."""
    entry = next(entry for entry in ENTRIES if entry.op == op)
    spec = next(spec for spec in entry.specs if spec.name == spec_name)
    arrays = entry.sample(spec, jnp.float32)
    return arrays, *entry.outputs_and_cotangents(spec, "reference", arrays)


def assert_equal_to_the_reference(entry, outputs, cotangents, expected_outputs, expected):
    entry.assert_outputs(outputs, expected_outputs)
    entry.assert_cotangents(cotangents, expected)
