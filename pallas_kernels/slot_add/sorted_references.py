"""References in the order of their slots, as the TPU's kernels take them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fwpkm_jax.core.slots.grouping import SlotGroups


class SortedReferences(NamedTuple):
    """By sorted position; behind the last reference come some that do nothing.

    Attributes:
      references: token * places + place, `[positions]`.
      coefficients: of each, `[positions]`.
      ended_slots: the slot whose run ends here, else -1, `[positions]`.
      ended_groups: which of the distinct slots that is, else -1, `[positions]`.
    """

    references: jax.Array
    coefficients: jax.Array
    ended_slots: jax.Array
    ended_groups: jax.Array


def sorted_references(
    groups: SlotGroups, coefficients: jax.Array, *, multiple: int
) -> SortedReferences:
    """The references of `groups`, their number filled up to a multiple of `multiple`."""
    references = groups.order.shape[0]
    position = jnp.arange(references, dtype=jnp.int32)
    ended = jnp.where(position < groups.num_groups, groups.starts[1:] - 1, references + position)

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
