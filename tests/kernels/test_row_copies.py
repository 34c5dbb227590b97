"""Simulates the asynchronous copies of the TPU row kernels and checks that they do not race."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.slot_add import tpu as slot_add_tpu
from pallas_kernels.slot_add.api import slot_add as plain_add
from pallas_kernels.slot_add.specs import sample
from pallas_kernels.slot_read import tpu as slot_read
from pallas_kernels.slot_read.api import slot_read as plain_read
from pallas_kernels.slot_read.specs import RowSpec
from pallas_kernels.slot_read.specs import sample as sample_read
from tests.kernels.entry import equal_or_close

SPEC = RowSpec(name="copies", tokens=20, places=2, slots=9)
MANY_SLOTS = RowSpec(name="many_slots", tokens=35, places=2, slots=50)
SIMULATION = pltpu.InterpretParams(
    detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan"
)


@pytest.mark.slow
def test_copies_of_reads_that_run_as_late_as_they_may_change_nothing(monkeypatch):
    # Rings and tiles small enough that a few tokens wrap them.
    monkeypatch.setattr(slot_read, "RING", 8)
    monkeypatch.setattr(slot_read, "TOKENS", 8)
    monkeypatch.setattr(dispatch, "interpreted", lambda: SIMULATION)

    reads = sample_read(SPEC, jnp.float32)
    actual = slot_read.read(*reads.values())
    assert not interpret_pallas_call.races.races_found
    equal_or_close(tuple(actual), tuple(plain_read(**reads, backend="reference")), ratio=1e-6)

    dots = slot_read.dot(reads["values"], reads["slot_ids"], reads["target"])
    assert not interpret_pallas_call.races.races_found
    rows = np.asarray(reads["values"])[np.asarray(reads["slot_ids"])]
    expected = np.einsum("tpv,tv->tp", rows, np.asarray(reads["target"]))
    equal_or_close(dots, expected, ratio=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("resident", [slot_add_tpu.RESIDENT, 0], ids=["in_vmem", "in_hbm"])
def test_copies_of_additions_that_run_as_late_as_they_may_change_nothing(monkeypatch, resident):
    # So many chunks and blocks that each buffer is used again.
    monkeypatch.setattr(slot_add_tpu, "BLOCK", 8)
    monkeypatch.setattr(slot_add_tpu, "CHUNK", 8)
    monkeypatch.setattr(slot_add_tpu, "RESIDENT", resident)
    monkeypatch.setattr(dispatch, "interpreted", lambda: SIMULATION)

    adds = sample(MANY_SLOTS, jnp.float32)
    distinct = int(adds["groups"].num_groups)
    assert distinct > 4 * 8
    values, old_rows = slot_add_tpu.add(**adds, with_old_rows=True)
    assert not interpret_pallas_call.races.races_found
    equal_or_close(values, plain_add(**adds, backend="reference"), ratio=1e-6)
    before = jnp.take(adds["values"], adds["groups"].slots[:distinct], axis=0)
    np.testing.assert_array_equal(old_rows[:distinct], before)
