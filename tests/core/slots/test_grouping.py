"""References grouped by slot: every reference once, every slot's run together and in order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fwpkm_jax.core.platform import compiled_for
from fwpkm_jax.core.slots.values import grouping
from fwpkm_jax.core.slots.values.grouping import group_chunks, group_slots, reference_counts
from fwpkm_jax.core.slots.values.table import slot_counts


@pytest.mark.thorough
@given(
    tokens=st.sampled_from([1, 3, 7]),  # Every shape is compiled.
    places=st.sampled_from([1, 4]),
    num_slots=st.sampled_from([1, 3, 50, 2**30]),
    seed=st.integers(0, 99),
)
def test_groups_are_the_sorted_distinct_slots_with_their_references(
    tokens, places, num_slots, seed
):
    ids = np.random.default_rng(seed).integers(num_slots, size=(tokens, places)).astype(np.int32)
    groups = jax.tree.map(np.asarray, group_slots(jnp.asarray(ids), num_slots=num_slots))
    distinct = np.unique(ids)
    assert groups.num_groups == distinct.size
    np.testing.assert_array_equal(groups.slots[: distinct.size], distinct)
    np.testing.assert_array_equal(groups.slots[groups.rank], ids)
    for number, slot in enumerate(distinct):
        run = groups.order[groups.starts[number] : groups.starts[number + 1]]
        np.testing.assert_array_equal(run, np.flatnonzero(ids.reshape(-1) == slot))
    assert np.all(groups.starts[distinct.size :] == ids.size)


@pytest.mark.thorough
def test_numbers_behind_the_last_slot_are_ascending_and_beyond_the_table():
    groups = group_slots(jnp.full((3, 2), 4, jnp.int32), num_slots=5)
    np.testing.assert_array_equal(groups.slots, [4, 6, 7, 8, 9, 10])


@pytest.mark.slow_cases("1")
@pytest.mark.thorough("1")
@pytest.mark.parametrize("chunks", [1, 3])
def test_chunks_are_grouped_side_by_side(chunks):
    ids = jax.random.randint(jax.random.key(0), (chunks, 5, 2), 0, 6)
    together = group_chunks(ids, num_slots=6)
    for index in range(chunks):
        alone = group_slots(ids[index], num_slots=6)
        mine = jax.tree.map(lambda x, i=index: x[i], together)
        jax.tree.map(np.testing.assert_array_equal, mine, alone)


@pytest.mark.thorough
def test_a_gpu_sorts_all_chunks_in_one_row():
    ids = jax.random.randint(jax.random.key(0), (3, 20), 0, 6)
    by_chunk = jax.vmap(lambda x: grouping._sort_by_slot(x, 6))(ids)
    jax.tree.map(np.testing.assert_array_equal, grouping._sort_chunks(ids, 6), by_chunk)

    def sorted_axes(platform, num_slots):
        ids = jax.ShapeDtypeStruct((3, 5, 4), jnp.int32)
        grouped = jax.jit(lambda ids: group_chunks(ids, num_slots=num_slots))
        with compiled_for(platform):
            text = grouped.trace(ids).lower().as_text()
        return re.findall(r'"stablehlo.sort".*?dimension = (\d)', text)

    assert sorted_axes("gpu", 6) == ["0"]
    assert sorted_axes("cpu", 6) == ["1"]
    assert sorted_axes("gpu", 2**30) == ["1"]  # Chunk and slot do not fit into 31 bits.


@pytest.mark.thorough
def test_counts_from_sorted_references_are_those_of_a_counter_per_slot():
    ids = jax.random.randint(jax.random.key(0), (6, 3), 0, 5)
    counted = jnp.asarray([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    groups = group_slots(ids, num_slots=5)
    expected = slot_counts(ids, counted, num_slots=5)
    np.testing.assert_array_equal(reference_counts(groups, counted), expected)
