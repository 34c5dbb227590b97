"""The references of a chunk to the slots of a table, grouped by slot.

A row of the table then has one owner that sums its references in a fixed order: no two additions
race for it, and two runs agree bit for bit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fwpkm_jax.core.array_types import SlotIds, SlotWeights, TokenWeights


class SlotGroups(NamedTuple):
    """References sorted by slot, and where each slot's run begins.

    A reference is a place of a token, numbered token * places + place.

    Attributes:
      order: the reference at each sorted position; those of one slot in ascending order.
      slots: the distinct slots, ascending; behind `num_groups` distinct numbers beyond the table.
      starts: sorted position where each distinct slot's run begins; `references` behind the last.
      rank: which of the distinct slots each reference reads.
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
      num_slots: rows of the table.
    """
    ids = slot_ids.reshape(-1).astype(jnp.int32)
    references = jnp.arange(ids.size, dtype=jnp.int32)
    sorted_ids, order = _sort_by_slot(ids, references, num_slots)
    begins = jnp.concatenate([jnp.ones((1,), bool), sorted_ids[1:] != sorted_ids[:-1]])
    group = jnp.cumsum(begins.astype(jnp.int32)) - 1
    rank = jnp.zeros_like(ids).at[order].set(group, unique_indices=True)
    # Every reference of a run writes the same slot; only its first one writes the start.
    slots = (num_slots + references).at[group].set(sorted_ids, indices_are_sorted=True)
    ends = jnp.full((ids.size + 1,), ids.size, jnp.int32)
    starts = ends.at[jnp.where(begins, group, ids.size + 1)].set(references, mode="drop")
    return SlotGroups(order, slots, starts, rank.reshape(slot_ids.shape), group[-1] + 1)


def _sort_by_slot(
    ids: jax.Array, references: jax.Array, num_slots: int
) -> tuple[jax.Array, jax.Array]:
    """Slots in ascending order, and the reference of each; as one number where both fit into it."""
    if num_slots * ids.size > 2**32:
        slots, order = jax.lax.sort((ids, references), num_keys=1, is_stable=True)
        return slots, order
    both = ids.astype(jnp.uint32) * np.uint32(ids.size) + references.astype(jnp.uint32)
    slots, order = jnp.divmod(jax.lax.sort(both, is_stable=False), np.uint32(ids.size))
    return slots.astype(jnp.int32), order.astype(jnp.int32)


def reference_counts(groups: SlotGroups, counted: TokenWeights | SlotWeights) -> SlotWeights:
    """How often the chunk read each place's slot, counting the tokens with `counted` = 1.

    As `memory.slot_counts`, from the sorted references: no counter per slot of the table. With
    `counted [tokens, places]` single references are left out.
    """
    places = groups.rank.shape[1]
    if counted.ndim == 1:
        sums = jnp.cumsum(counted[groups.order // places])
    else:
        sums = jnp.cumsum(counted.reshape(-1)[groups.order])
    sums = jnp.concatenate([jnp.zeros((1,), sums.dtype), sums])
    return jnp.diff(sums[groups.starts])[groups.rank]
