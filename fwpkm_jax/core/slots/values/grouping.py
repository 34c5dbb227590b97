"""The references of a chunk to the slots of a table, grouped by slot.

Each row of the table then sums its references in a fixed order. No two additions race for a row, so
two runs agree bit for bit.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fwpkm_jax.core.array_types import SlotIds, SlotWeights, TokenWeights
from fwpkm_jax.core.platform import platform


class SlotGroups(NamedTuple):
    """References sorted by slot, and where each slot's run begins.

    A reference is a place of a token, numbered token * places + place.

    Attributes:
      order: the reference at each sorted position; those of one slot in ascending order.
      slots: the distinct slots, ascending. The entries after the first `num_groups` are distinct
        numbers that lie outside the table.
      starts: sorted position where each distinct slot's run begins; the number of references for
        the entries after the last run.
      rank: index in `slots` of the slot that each reference reads.
      num_groups: how many distinct slots there are.
    """

    order: Int[Array, " references"]
    slots: Int[Array, " references"]
    starts: Int[Array, " references_and_end"]
    rank: Int[Array, "tokens places"]
    num_groups: Int[Array, ""]


def group_slots(slot_ids: SlotIds, *, num_slots: int) -> SlotGroups:
    """Groups the references of one chunk by slot: one sort, then run lengths.

    Args:
      slot_ids: `[tokens, places]`, each below `num_slots`.
    """
    ids = slot_ids.reshape(-1).astype(jnp.int32)
    return _groups_of(slot_ids, *_sort_by_slot(ids, num_slots), num_slots=num_slots)


def group_chunks(slot_ids: Int[Array, "chunks tokens places"], *, num_slots: int) -> SlotGroups:
    """`group_slots` of every chunk, leaves `[chunks, ...]`.

    A GPU sorts the references of all chunks together, by chunk, then slot: XLA calls its radix sort
    for one row of numbers alone, and sorts several rows by comparing neighbours many times.
    """
    ids = slot_ids.reshape(slot_ids.shape[0], -1).astype(jnp.int32)
    # On a GPU in one number, if chunk and slot fit into it.
    if platform() == "gpu" and ids.shape[0] * num_slots <= 2**31:
        found = _sort_chunks(ids, num_slots)
    else:
        found = jax.vmap(functools.partial(_sort_by_slot, num_slots=num_slots))(ids)
    return jax.vmap(functools.partial(_groups_of, num_slots=num_slots))(slot_ids, *found)


def _groups_of(
    slot_ids: SlotIds, sorted_ids: jax.Array, order: jax.Array, *, num_slots: int
) -> SlotGroups:
    """The groups of one chunk from its sorted references."""
    references = jnp.arange(order.size, dtype=jnp.int32)
    begins = jnp.concatenate([jnp.ones((1,), bool), sorted_ids[1:] != sorted_ids[:-1]])
    group = jnp.cumsum(begins.astype(jnp.int32)) - 1
    # Back in the order of references, for gathers by token.
    rank = jnp.zeros_like(order).at[order].set(group, unique_indices=True)
    # Every reference of a run writes the same slot; only its first one writes the start.
    slots = (num_slots + references).at[group].set(sorted_ids, indices_are_sorted=True)
    ends = jnp.full((order.size + 1,), order.size, jnp.int32)
    starts = ends.at[jnp.where(begins, group, order.size + 1)].set(references, mode="drop")
    return SlotGroups(order, slots, starts, rank.reshape(slot_ids.shape), group[-1] + 1)


def _sort_chunks(ids: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """Slots in ascending order and the reference of each, of all chunks by one sort."""
    chunks = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    references = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    of_chunks, order = jax.lax.sort(
        ((ids + num_slots * chunks).reshape(-1), references.reshape(-1)),
        num_keys=1,
        is_stable=True,
    )
    return of_chunks.reshape(ids.shape) - num_slots * chunks, order.reshape(ids.shape)


def _sort_by_slot(ids: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """Slots in ascending order, and the reference of each; as one number where both fit into it."""
    references = jnp.arange(ids.size, dtype=jnp.int32)
    if num_slots * ids.size > 2**32:
        slots, order = jax.lax.sort((ids, references), num_keys=1, is_stable=True)
        return slots, order
    # Slot and reference in one number: a sort of one array, whose ties cannot occur.
    both = ids.astype(jnp.uint32) * np.uint32(ids.size) + references.astype(jnp.uint32)
    slots, order = jnp.divmod(jax.lax.sort(both, is_stable=False), np.uint32(ids.size))
    return slots.astype(jnp.int32), order.astype(jnp.int32)


def reference_counts(groups: SlotGroups, counted: TokenWeights | SlotWeights) -> SlotWeights:
    """How often the chunk read each place's slot, counting the tokens with `counted` = 1.

    Equal to `table.slot_counts`, but computed from the sorted references, without a counter for
    each slot of the table. With `counted [tokens, places]`, single references can be left out.
    """
    places = groups.rank.shape[1]
    by_token = counted.ndim == 1
    ordered = counted[groups.order // places] if by_token else counted.reshape(-1)[groups.order]
    # A run's count is the difference of two prefix sums.
    sums = jnp.cumsum(ordered)
    sums = jnp.concatenate([jnp.zeros((1,), sums.dtype), sums])
    return jnp.diff(sums[groups.starts])[groups.rank]
