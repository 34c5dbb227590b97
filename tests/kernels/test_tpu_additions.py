"""The TPU kernel of `slot_add` where its chunks of references and blocks of slots begin and end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.slots.values.grouping import group_slots
from pallas_kernels import dispatch
from pallas_kernels.slot_add import slot_add, tpu
from tests.kernels.entry import equal_or_close

SLOTS, PLACES, WIDTH = 64, 2, 128
RUNS = {
    "one slot, longer than several chunks": [48],
    "ends at the edges of chunks and of blocks": [9, 1, 1, 1, 1, 1, 1, 1, 16, 8, 2, 1, 1, 1, 1, 2],
    "every slot once": [1] * 48,
    "long and short": [1, 25, 1, 1, 2, 3, 1, 1, 1, 11, 1],
}
"""How many of 48 references each distinct slot has."""
PLACED = {"in_vmem": tpu.RESIDENT, "in_hbm": 0}
"""Where the tokens' rows are while they are added, by the size above which they stay in HBM."""


def arrays_with(runs):
    """Arguments of one addition, in which the r-th of some slots is read `runs[r]` times."""
    rng = np.random.default_rng(len(runs))
    distinct = np.sort(rng.permutation(SLOTS)[: len(runs)])
    slot_ids = rng.permutation(np.repeat(distinct, runs)).astype("i4").reshape(-1, PLACES)
    tokens = slot_ids.shape[0]
    return {
        "values": jnp.asarray(rng.normal(size=(SLOTS, WIDTH)), jnp.float32),
        "groups": group_slots(jnp.asarray(slot_ids), num_slots=SLOTS),
        "coefficients": jnp.asarray(rng.normal(size=slot_ids.shape), jnp.float32),
        "rows": jnp.asarray(rng.normal(size=(tokens, WIDTH)), jnp.float32),
    }


@functools.cache
def compiled(*, chunk=16, block=8, resident=tpu.RESIDENT, with_old_rows=True):
    """`tpu.add` with small chunks and blocks, for the shapes of `arrays_with`."""
    with pytest.MonkeyPatch.context() as patch, dispatch.interpret_kernels("tpu"):
        for name, size in {"CHUNK": chunk, "BLOCK": block, "RESIDENT": resident}.items():
            patch.setattr(tpu, name, size)
        add = jax.jit(functools.partial(tpu.add, with_old_rows=with_old_rows))
        return add.lower(**arrays_with([48])).compile()


@pytest.mark.thorough("one slot, longer than several chunks-in_vmem")
@pytest.mark.parametrize("resident", PLACED.values(), ids=PLACED)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_runs_end_anywhere(runs, resident):
    arrays = arrays_with(runs)
    values, old_rows = compiled(resident=resident)(**arrays)
    equal_or_close(values, slot_add(**arrays, backend="reference"), ratio=1e-6)
    slots = np.asarray(arrays["groups"].slots)[: len(runs)]
    np.testing.assert_array_equal(old_rows[: len(runs)], arrays["values"][slots])
    others = np.setdiff1d(np.arange(SLOTS), slots)
    np.testing.assert_array_equal(values[others], arrays["values"][others])


@pytest.mark.slow
@pytest.mark.parametrize("resident", PLACED.values(), ids=PLACED)
def test_a_nan_of_one_token_changes_only_the_slots_that_it_reads(resident):
    arrays = arrays_with([4] * 12)
    add = compiled(resident=resident)
    expected, _ = add(**arrays)
    broken, _ = add(**{**arrays, "rows": arrays["rows"].at[5].set(jnp.nan)})
    hit = np.asarray(arrays["groups"].slots)[np.asarray(arrays["groups"].rank)[5]]
    assert np.isnan(np.asarray(broken)[hit]).all()
    others = np.setdiff1d(np.arange(SLOTS), hit)
    np.testing.assert_array_equal(broken[others], expected[others])


@pytest.mark.slow
def test_neither_the_sizes_of_chunks_and_blocks_nor_a_log_change_a_bit():
    arrays = arrays_with(RUNS["long and short"])
    # Powers of 2, because a CPU rounds a product and its sum once or twice, as it likes.
    powers = jnp.exp2(jnp.round(arrays["coefficients"]))
    arrays["coefficients"] = jnp.copysign(powers, arrays["coefficients"])
    values, _ = compiled()(**arrays)
    others, nothing = compiled(chunk=8, block=16, with_old_rows=False)(**arrays)
    assert nothing is None
    np.testing.assert_array_equal(others, values)
