"""Simulates the asynchronous copies of the TPU row kernels and checks that they do not race."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.slot_add import tpu as slot_add_tpu
from pallas_kernels.slot_add.reference import slot_add as expected_add
from pallas_kernels.slot_add.specs import sample
from pallas_kernels.slot_read import tpu as slot_read
from pallas_kernels.slot_read.reference import slot_read as expected_read
from pallas_kernels.slot_read.specs import RowSpec
from pallas_kernels.slot_read.specs import sample as sample_read
from tests.kernels.entry import equal_or_close

SPEC = RowSpec(name="copies", tokens=20, places=2, slots=9)


@pytest.mark.thorough
def test_copies_that_run_as_late_as_they_may_change_nothing(monkeypatch):
    # Rings and tiles small enough that a few tokens wrap them and a slot's run crosses tiles.
    monkeypatch.setattr(slot_read, "RING", 8)
    monkeypatch.setattr(slot_read, "TOKENS", 8)
    monkeypatch.setattr(slot_add_tpu, "BLOCK", 8)
    monkeypatch.setattr(slot_add_tpu, "CHUNK", 8)
    simulation = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan"
    )
    monkeypatch.setattr(dispatch, "interpreted", lambda: simulation)

    reads = sample_read(SPEC, jnp.float32)
    actual = slot_read.read(*reads.values())
    assert not interpret_pallas_call.races.races_found
    equal_or_close(tuple(actual), tuple(expected_read(*reads.values())), ratio=1e-6)

    dots = slot_read.dot(reads["values"], reads["slot_ids"], reads["target"])
    assert not interpret_pallas_call.races.races_found
    rows = np.asarray(reads["values"])[np.asarray(reads["slot_ids"])]
    expected = np.einsum("tpv,tv->tp", rows, np.asarray(reads["target"]))
    equal_or_close(dots, expected, ratio=1e-6)

    adds = sample(SPEC, jnp.float32)
    values, old_rows = slot_add_tpu.add(**adds, with_old_rows=True)
    assert not interpret_pallas_call.races.races_found
    equal_or_close(values, expected_add(**adds), ratio=1e-6)
    distinct = int(adds["groups"].num_groups)
    before = jnp.take(adds["values"], adds["groups"].slots[:distinct], axis=0)
    np.testing.assert_array_equal(old_rows[:distinct], before)
