"""Float32 arrays go through the kernels also where doubles are switched on."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from tests.kernels.entries import ENTRIES

CASES = [
    pytest.param(entry, kernel, id=f"{entry.op}-{kernel}")
    for entry in ENTRIES
    for kernel in entry.kernels
]


@pytest.mark.by_default(
    "chunk_gated_delta_rule-tpu", "product_top_k-tpu", thorough=["add_rms_norm-gpu"]
)
@pytest.mark.parametrize(("entry", "kernel"), CASES)
def test_kernels_are_traced_where_doubles_are_switched_on(entry, kernel):
    """Python numbers then become 64-bit integers, which do not combine with 32-bit indices."""
    spec = next(spec for spec in entry.specs if spec.small)
    arrays = entry.sample(spec, jnp.float32)
    with jax.enable_x64(True), dispatch.interpret_kernels(kernel):
        outputs = jax.eval_shape(lambda arrays: entry.call(spec, "pallas", **arrays), arrays)
    with dispatch.interpret_kernels(kernel):
        expected = jax.eval_shape(lambda arrays: entry.call(spec, "pallas", **arrays), arrays)
    assert outputs == expected
