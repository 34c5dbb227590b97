"""Kernels that exchange a chunk's rows, forward and backward, against plain XLA."""

import pytest

from pallas_kernels import dispatch
from pallas_kernels.slot_add.specs import exchange_errors
from pallas_kernels.slot_read.specs import RowSpec

SPECS = (
    RowSpec(name="few_slots", tokens=5, places=2, slots=6, value=8),
    RowSpec(name="many_places", tokens=4, places=11, slots=30, value=16, drawn="zipf"),
    RowSpec(name="one_hot_slot", tokens=80, places=1, slots=9, value=8, drawn="one"),
)


@pytest.mark.slow_cases("gpu-many_places", "tpu-one_hot_slot", "tpu-many_places")
@pytest.mark.thorough("gpu-many_places", "tpu-many_places", "tpu-one_hot_slot")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_an_exchange_and_its_way_back_equal_plain_xla(kernel, spec):
    with dispatch.interpret_kernels(kernel):
        errors = exchange_errors(spec, kernel)
    assert len(errors) == 6
    assert max(errors.values()) < 1e-5, errors
