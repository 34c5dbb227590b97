"""Value tables that share one base: each group keeps only the rows that it has written.

A group's rows stand in the order in which they were first written. A sorted list of slots finds
them. A read takes the group's own row of a slot if there is one, else the base's. A write first
gives every slot that it reaches a row of its own, a copy of the base's. The group's rows then are a
small table that the executors and their kernels (`core.slots.values`) read and write as any other,
so results equal those of a private table bit for bit.

Shapes are static: a group has room for `capacity` rows. A slot that finds no room is lost. This is
counted, and from then on all reads of this group are NaN, so that no answer silently lacks a write.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import SlotIds, TokenWeights, ValueTable
from fwpkm_jax.core.chunks import Shared, map_memories
from fwpkm_jax.core.slots.two_phase import WrittenValues, write_values
from fwpkm_jax.core.slots.values.grouping import group_slots
from fwpkm_jax.core.slots.write import SlotAccess


class OverlayTable(NamedTuple):
    """A value table `[slots, value]` as a shared base and the rows that differ from it.

    It takes the place of the array of values in a memory. With a leading axis of groups, every
    field but `base` has that axis.

    Attributes:
      slots: slots with a row of their own, ascending; the number of slots where there is none.
      places: the row of each.
      used: how many rows are in use.
      lost: how many slots found no room; above 0, every read is NaN.
      base: the table of all slots, the same for all groups.
      rows: the own rows in the order of their first write, and one more row: padding and lost slots
        point to it.
    """

    slots: Int[Array, " capacity"]
    places: Int[Array, " capacity"]
    used: Int[Array, ""]
    lost: Int[Array, ""]
    base: Shared
    rows: Float[Array, "capacity_and_one value"]

    @property
    def capacity(self) -> int:
        """Rows that a group can write."""
        return self.slots.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the table that it stands for."""
        return (*self.rows.shape[:-2], *self.base.array.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.rows.dtype


AnyTable = Float[Array, "..."] | OverlayTable
"""A value table: an array, or an overlay."""


class OpenRows(NamedTuple):
    """The rows that a chunk reads and writes, as a table of its own.

    Attributes:
      values: the table, with a row for each slot of the chunk.
      rows: the rows, for an executor; `close_rows` takes them back.
      slot_ids: the row that each place of a token reads.
    """

    values: AnyTable
    rows: ValueTable
    slot_ids: SlotIds


def rows_to_read(values: AnyTable, slot_ids: SlotIds) -> tuple[ValueTable, SlotIds]:
    """A table and the row of it that each place reads: an array itself, or copies of the rows."""
    if not isinstance(values, OverlayTable):
        return values, slot_ids
    # A copy for each place: own rows and rows of the base lie in different arrays.
    slots = slot_ids.reshape(-1)
    place, held, _ = _find(values, slots)
    own = values.rows.at[place].get(mode="promise_in_bounds")
    base = values.base.array.at[slots].get(mode="promise_in_bounds")
    rows = jnp.where(held[:, None], own, base)
    # An overlay that lost rows has no right reads any more.
    rows = jnp.where(values.lost > 0, jnp.nan, rows)
    return rows, jnp.arange(slots.size, dtype=slot_ids.dtype).reshape(slot_ids.shape)


def open_rows(values: AnyTable, slot_ids: SlotIds, counted: TokenWeights) -> OpenRows:
    """Rows for an executor that reads and writes one memory.

    Args:
      slot_ids: the slots that the tokens read.
      counted: 0 for padding, whose slots get no row and whose reads have no meaning.
    """
    if not isinstance(values, OverlayTable):
        return OpenRows(values, values, slot_ids)
    capacity, base = values.capacity, values.base.array
    padding = base.shape[0]
    # Padding reads an extra slot behind the table, which gets no row.
    slots = jnp.where(counted[:, None] > 0, slot_ids.astype(jnp.int32), padding)
    groups = group_slots(slots, num_slots=padding + 1)
    slots, number = groups.slots, jnp.arange(groups.slots.size, dtype=jnp.int32)
    place, held, at = _find(values, slots)
    new = (slots < padding) & ~held
    # New slots take the next free rows, in ascending order of slots.
    rank = jnp.cumsum(new, dtype=jnp.int32) - 1
    fits = new & (values.used + rank < capacity)
    place = jnp.where(held, place, jnp.where(fits, values.used + rank, capacity))
    lost = values.lost + jnp.sum(new & ~fits, dtype=jnp.int32)

    # Where a new slot stands among the sorted ones; entries that are not new go nowhere.
    source = jnp.zeros((capacity,), jnp.int32)
    into = jnp.where(fits, at + rank, capacity + number)
    source = source.at[into].set(1 + number, mode="drop", unique_indices=True)
    inserted = source > 0
    old = jnp.arange(capacity, dtype=jnp.int32) - jnp.cumsum(inserted, dtype=jnp.int32)

    def insert(own: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(inserted, new[jnp.maximum(source - 1, 0)], own[jnp.maximum(old, 0)])

    into = jnp.where(fits, place, capacity + 1 + number)
    copied = base.at[slots].get(mode="clip").astype(values.dtype)
    rows = values.rows.at[into].set(copied, mode="drop", unique_indices=True)
    # What found no row must not pass unseen: its reads become NaN.
    rows = rows.at[capacity].set(jnp.where(lost > 0, jnp.nan, 0.0))
    values = OverlayTable(
        slots=insert(values.slots, slots),
        places=insert(values.places, place),
        used=values.used + jnp.sum(fits, dtype=jnp.int32),
        lost=lost,
        base=values.base,
        rows=rows,
    )
    return OpenRows(values, rows, place[groups.rank])


def open_groups(
    values: OverlayTable,
    slot_ids: Int[Array, "groups chunks tokens places"],
    counted: Float[Array, "groups chunks tokens"],
) -> OpenRows:
    """`open_rows` of all chunks of several memories, every leaf with their leading axis."""

    def open_group(values: OverlayTable, slot_ids: jax.Array, counted: jax.Array) -> OpenRows:
        opened = open_rows(values, slot_ids.reshape(counted.size, -1), counted.reshape(-1))
        return opened._replace(slot_ids=opened.slot_ids.reshape(slot_ids.shape))

    return map_memories(open_group, values, slot_ids, counted)


def open_written(
    values: OverlayTable,
    write_ids: Int[Array, "groups tokens writes"],
    read_ids: Int[Array, "groups tokens reads"],
    counted: Float[Array, "groups tokens"],
) -> tuple[OpenRows, Int[Array, "groups tokens reads"]]:
    """`open_groups` where tokens read other slots than they write.

    A slot that is only read gets no row of its own: copies for the reads stand behind the rows.

    Returns:
      The open rows with these copies, `slot_ids` of the written places, and the row of each place
      that is read.
    """
    opened = open_groups(values, write_ids[:, None], counted[:, None])

    def with_reads(values: OverlayTable, slot_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        place, held, _ = _find(values, slot_ids.reshape(-1))
        copies, number = rows_to_read(values, slot_ids)
        at = jnp.where(held, place, values.capacity + 1 + number.reshape(-1))
        return jnp.concatenate([values.rows, copies]), at.reshape(slot_ids.shape)

    rows, reads = map_memories(with_reads, opened.values, read_ids)
    return opened._replace(rows=rows, slot_ids=opened.slot_ids[:, 0]), reads


def write_overlays(
    values: OverlayTable,
    access: SlotAccess,
    targets: Float[Array, "groups chunks tokens value"],
    *,
    counted: Float[Array, "groups chunks tokens"],
    **options: Any,
) -> WrittenValues:
    """`two_phase.write_values` of tables that share a base.

    Every slot of the chunks gets a row of its own; these rows are the table that is written.

    Args:
      values: before the first token.
      access, targets, counted: as there.
    """
    opened = open_groups(values, access.slot_ids, counted)
    # From here on a slot is a row of the small table.
    access = access._replace(slot_ids=opened.slot_ids)
    out = write_values(opened.rows, access, targets, counted=counted, **options)
    assert isinstance(opened.values, OverlayTable)
    return out._replace(values=opened.values._replace(rows=out.values))


def close_rows(values: AnyTable, rows: Float[Array, "..."]) -> AnyTable:
    """The table with the rows that an executor has written."""
    return values._replace(rows=rows) if isinstance(values, OverlayTable) else rows


def whole_table(values: AnyTable) -> ValueTable:
    """One memory's table as an array, for what an overlay does not do."""
    if isinstance(values, OverlayTable):
        raise ValueError(
            "memory.values is an overlay, which run and write of the rule that made it change, "
            "not step; use these, or make it private (overlays.to_private)."
        )
    return values


def _find(values: OverlayTable, slots: Int[Array, " n"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each slot its row, whether it has one, and where it stands among the sorted slots."""
    # The slots of an overlay are kept sorted, so a search finds one in few steps.
    at = jnp.searchsorted(values.slots, slots).astype(jnp.int32)
    near = jnp.minimum(at, values.capacity - 1)
    held = (values.slots[near] == slots) & (slots < values.base.array.shape[0])
    return values.places[near], held, at


def overlays_of(values: AnyTable, base: AnyTable, *, capacity: int) -> OverlayTable:
    """Tables as overlays of a base: their rows that differ from it. Not inside `jax.jit`.

    Args:
      values: `[groups, slots, value]`, arrays or overlays of whatever base.
      base: what they share, `[1, slots, value]`.
      capacity: rows of each group, 1 to the number of slots.

    Raises:
      ValueError: the base is not one table, a table differs from it in more rows, or an overlay has
        lost some.
    """
    values, base = private_tables(values), private_tables(base)
    if base.shape[0] != 1:
        raise ValueError(f"base has {base.shape[0]} groups; give it one, as overlays.take_users.")
    base, num_slots = base[0], base.shape[1]
    if not 1 <= capacity <= num_slots:
        raise ValueError(f"capacity={capacity} must lie between 1 and the {num_slots} slots.")
    differs = np.asarray(jnp.any(values != base[None], axis=-1))
    used = differs.sum(axis=1).astype(np.int32)
    if used.max() > capacity:
        raise ValueError(
            f"capacity={capacity}, but group {used.argmax()} differs from the base in "
            f"{used.max()} slots; raise capacity."
        )
    slots = np.full((len(used), capacity), num_slots, np.int32)
    for own, changed in zip(slots, differs, strict=True):
        own[: changed.sum()] = np.flatnonzero(changed)
    rows = jnp.take_along_axis(values, np.minimum(slots, num_slots - 1)[..., None], axis=1)
    rows = jnp.where((slots < num_slots)[..., None], rows, 0)
    return OverlayTable(
        slots=jnp.asarray(slots),
        places=jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), slots.shape),
        used=jnp.asarray(used),
        lost=jnp.zeros(used.shape, jnp.int32),
        base=Shared(base),
        rows=jnp.pad(rows, ((0, 0), (0, 1), (0, 0))),
    )


def private_tables(values: AnyTable) -> Float[Array, "groups slots value"]:
    """The tables that overlays stand for, as arrays.

    Raises:
      ValueError: a group has lost rows, see `refuse_lost`.
    """
    if not isinstance(values, OverlayTable):
        return values
    refuse_lost("values", values)
    base = values.base.array

    def of_group(slots: jax.Array, places: jax.Array, rows: jax.Array) -> jax.Array:
        return base.at[slots].set(rows[places], mode="drop")

    return jax.vmap(of_group)(values.slots, values.places, values.rows)


def with_capacity(values: OverlayTable, capacity: int) -> OverlayTable:
    """Overlays with room for `capacity` rows of each group, at least as many as are in use.

    Raises:
      ValueError: more rows are in use, or some were lost.
    """
    refuse_lost("values", values)
    used = int(values.used.max())
    if not used <= capacity <= values.shape[1] or capacity < 1:
        raise ValueError(
            f"capacity={capacity} must lie between the {used} rows in use and the "
            f"{values.shape[1]} slots."
        )
    more = max(0, capacity - values.capacity)

    def fit(x: jax.Array, fill: int) -> jax.Array:
        rest = [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, [(0, 0), (0, more), *rest], constant_values=fill)[:, :capacity]

    return values._replace(
        slots=fit(values.slots, values.shape[1]),
        places=fit(values.places, 0),
        rows=jnp.pad(fit(values.rows[:, :-1], 0), ((0, 0), (0, 1), (0, 0))),
    )


def refuse_lost(name: str, values: OverlayTable) -> None:
    """Raises a ValueError if a group of these overlays has lost rows."""
    lost = np.asarray(values.lost)
    if lost.any():
        raise ValueError(
            f"{name} has room for capacity={values.capacity} rows of each user, and user "
            f"{lost.argmax()} lost {lost.max()} more that it wrote; go back to the memory before "
            "and raise capacity (overlays.with_capacity), or make it private "
            "(overlays.to_private)."
        )
