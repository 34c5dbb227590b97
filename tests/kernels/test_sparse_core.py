"""The kernels for SparseCores beyond parity: portions of work, what does not fit, batches.

On a CPU copies by index are loops over rows: what is interpreted is which rows are copied where,
not that copies overlap without harm. That is left to a device's own check and tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compiled.absent_devices import kernels_for
from fwpkm_jax.core.slots.grouping import group_slots
from pallas_kernels import dispatch
from pallas_kernels.checks import refuse_rows
from pallas_kernels.slot_add import tpu_sparse_core as write
from pallas_kernels.slot_add.reference import slot_add_with_old_rows
from pallas_kernels.slot_add.specs import sample as sample_add
from pallas_kernels.slot_read import reference, tpu_sparse_core
from pallas_kernels.slot_read.api import slot_read
from pallas_kernels.slot_read.specs import RowSpec, sample
from tests.kernels.entry import equal_or_close


@pytest.mark.thorough
def test_reads_in_many_blocks_and_rounds_equal_the_reference(monkeypatch):
    monkeypatch.setattr(tpu_sparse_core, "BLOCK", 400)  # Two tokens' rows.
    monkeypatch.setattr(tpu_sparse_core, "ROUND", 2)
    arrays = sample(RowSpec(name="rounds", tokens=37, places=3, slots=9, value=16), jnp.float32)
    values, slot_ids, target = arrays["values"], arrays["slot_ids"], arrays["target"]
    with dispatch.interpret_kernels("tpu_sparse_core"):
        plan = tpu_sparse_core._Plan.of(37, 3, 16)
        assert (plan.block, plan.rounds) == (2, 3)
        actual = jax.jit(tpu_sparse_core.read)(*arrays.values())
        dots = jax.jit(tpu_sparse_core.dot)(values, slot_ids, target)
    equal_or_close(actual, tuple(reference.slot_read(*arrays.values())), ratio=1e-6)
    equal_or_close(dots, reference.slot_dot(values, slot_ids, target), ratio=1e-6)


@pytest.mark.thorough
def test_runs_longer_than_blocks_have_one_owner(monkeypatch):
    monkeypatch.setattr(write, "BLOCK", 16 * 16 * 4)  # Sixteen references' rows.
    spec = RowSpec(name="runs", tokens=60, places=3, slots=5, drawn="zipf", value=16)
    arrays = sample_add(spec, jnp.float32)
    with dispatch.interpret_kernels("tpu_sparse_core"):
        actual = jax.jit(lambda arrays: write.add(**arrays, with_old_rows=True))(arrays)
    expected = slot_add_with_old_rows(**arrays)
    equal_or_close(actual[0], expected.values, ratio=1e-6)
    distinct = int(arrays["groups"].num_groups)
    np.testing.assert_array_equal(actual[1][:distinct], expected.old_rows[:distinct])


@pytest.mark.by_default(
    "4-zipf", "4-distinct", "4-random", "64-one", "64-zipf", "64-distinct", "64-random"
)
@pytest.mark.parametrize("drawn", ["one", "zipf", "distinct", "random"])
@pytest.mark.parametrize("subcores", [4, 64])
def test_parts_of_the_references_begin_where_runs_begin(drawn, subcores):
    spec = RowSpec(name="parts", tokens=40, places=3, slots=200, drawn=drawn)
    slot_ids = sample(spec, jnp.float32)["slot_ids"]
    groups = group_slots(slot_ids, num_slots=200)
    parts = np.asarray(write._parts(groups.starts, subcores, 8)).reshape(subcores, 8)[:, :2]
    begins = set(np.asarray(groups.starts)[: int(groups.num_groups)].tolist())
    assert parts[0, 0] == 0
    assert parts[-1, 1] == 120
    np.testing.assert_array_equal(parts[1:, 0], parts[:-1, 1])
    assert set(parts[:, 0].tolist()) <= begins | {120}
    longest = np.diff(np.asarray(groups.starts)).max()
    assert np.diff(parts).max() <= -(-120 // subcores) + longest


@pytest.mark.parametrize(
    ("width", "places", "reason"),
    [
        (512, 32, None),
        (128, 128, None),
        (1024, 8, "rows of 1024 values, at most 512"),
        (128, 129, "129 places, at most 128"),
        (512, 33, "33 rows of 512 values for a token, at most 65536 bytes"),
        (500, 8, "rows of 500 values, only multiples of 128"),
    ],
)
def test_what_a_subcore_has_no_memory_for_is_refused(width, places, reason):
    values = jnp.zeros((2, width))
    assert refuse_rows(values, (), "tpu_sparse_core", places=places) == reason


def test_a_batch_of_reads_runs_in_turn():
    arrays = sample(RowSpec(name="batch", tokens=8, places=2, slots=16), jnp.float32)
    batch = jax.tree.map(lambda x: jnp.stack([x] * 3), arrays)

    def read(arrays):
        return slot_read(**arrays, backend="pallas").output

    with kernels_for("v6e_sparse_core"):
        lowered = jax.jit(jax.vmap(read)).trace(batch).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("SPARSECORE") == 1
