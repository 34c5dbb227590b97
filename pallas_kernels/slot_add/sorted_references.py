"""References sorted by slot, in the form that the TPU kernels need."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fwpkm_jax.core.slots.values.grouping import SlotGroups


class SortedReferences(NamedTuple):
    """References in sorted order, padded at the end with references that add zero.

    A run is all references to one slot; it is contiguous in sorted order.

    Attributes:
      references: token * places + place, `[positions]`.
      coefficients: the coefficient of each reference, `[positions]`.
      ended_slots: the slot whose run ends at this position, else -1, `[positions]`.
      ended_groups: the index of that slot among the distinct slots, else -1, `[positions]`.
    """

    references: jax.Array
    coefficients: jax.Array
    ended_slots: jax.Array
    ended_groups: jax.Array


def sorted_references(
    groups: SlotGroups, coefficients: jax.Array, *, multiple: int
) -> SortedReferences:
    """The references of `groups` in sorted order, padded to a multiple of `multiple`."""
    references = groups.order.shape[0]
    position = jnp.arange(references, dtype=jnp.int32)
    ended = jnp.where(position < groups.num_groups, groups.starts[1:] - 1, references + position)

    # Entries behind the last slot are sent to places outside, which `drop` leaves out.
    def at_ends(of_groups: jax.Array) -> jax.Array:
        nowhere = jnp.full((references,), -1, jnp.int32)
        return nowhere.at[ended].set(of_groups, mode="drop", unique_indices=True)

    def filled(x: jax.Array, filling: int) -> jax.Array:
        return jnp.pad(x, (0, -references % multiple), constant_values=filling)

    return SortedReferences(
        filled(groups.order, 0),
        filled(coefficients.reshape(-1).at[groups.order].get(unique_indices=True), 0),
        filled(at_ends(groups.slots), -1),
        filled(at_ends(position), -1),
    )
