"""Rows of overlays: who gets one, and where it is found."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fwpkm_jax.core.slots.options.overlay import (
    open_groups,
    open_rows,
    overlays_of,
    private_tables,
    rows_to_read,
)


@pytest.mark.thorough
def test_each_slot_that_is_reached_gets_one_row_and_padding_none():
    base = np.random.default_rng(0).normal(size=(1, 9, 3)).astype(np.float32)
    tables = np.repeat(base, 2, axis=0)
    tables[0, [2, 7]] += 1.0
    overlay = overlays_of(jnp.asarray(tables), jnp.asarray(base), capacity=6)
    slot_ids = np.array([[[[7, 5], [1, 3], [5, 0]]], [[[8, 6], [4, 4], [6, 2]]]], np.int32)
    counted = np.array([[[1, 0, 1]], [[0, 1, 1]]], np.float32)

    opened = jax.jit(open_groups)(overlay, jnp.asarray(slot_ids), jnp.asarray(counted))

    npt.assert_array_equal(opened.values.used, [4, 3])
    npt.assert_array_equal(opened.values.slots, [[0, 2, 5, 7, 9, 9], [2, 4, 6, 9, 9, 9]])
    npt.assert_array_equal(opened.values.lost, [0, 0])
    npt.assert_array_equal(private_tables(opened.values), tables)
    for group, (ids, real) in enumerate(zip(slot_ids, counted, strict=True)):
        read = np.asarray(opened.rows)[group][np.asarray(opened.slot_ids)[group]]
        npt.assert_array_equal(read[real > 0], tables[group][ids[real > 0]])


@pytest.mark.thorough
def test_slots_without_room_are_counted_and_no_later_read_is_a_number():
    base = jnp.arange(12.0).reshape(1, 6, 2)
    overlay = overlays_of(base, base, capacity=2)
    overlay = jax.tree.map(lambda x: x[0], overlay._replace(base=None))._replace(base=overlay.base)

    @jax.jit
    def write_and_read(slot_ids):
        opened = open_rows(overlay, slot_ids, jnp.ones(2))
        return opened.values.lost, rows_to_read(opened.values, jnp.array([[0]]))[0]

    lost, read = write_and_read(jnp.array([[1], [4]]))
    npt.assert_array_equal(lost, 0)
    npt.assert_array_equal(read, base[0, :1])
    lost, read = write_and_read(jnp.array([[1, 2], [4, 2]]))
    npt.assert_array_equal(lost, 1)
    npt.assert_array_equal(read, np.nan)
