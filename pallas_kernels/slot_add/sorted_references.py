"""References sorted by slot, in the form that the TPU kernel needs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from fwpkm_jax.core.slots.values.grouping import SlotGroups


class SortedReferences(NamedTuple):
    """References in chunks and distinct slots in blocks, both ordered by slot.

    A run is all references to one slot; it is contiguous in sorted order. The last chunk and the
    last block are padded with zeros, which the kernel does not use.

    Attributes:
      steps: token * 2, plus 1 at the first reference of a run, `[chunks, 1, chunk]`.
      coefficients: the coefficient of each reference, `[chunks, 1, chunk]`.
      slots: the distinct slots, ascending, `[blocks, 1, block]`. The entries after the last
        distinct slot are arbitrary slots of the table.
      starts: sorted position where each block's first run begins, and the number of references,
        `[blocks + 1]`.
    """

    steps: jax.Array
    coefficients: jax.Array
    slots: jax.Array
    starts: jax.Array


def sorted_references(
    groups: SlotGroups, coefficients: jax.Array, *, num_slots: int, chunk: int, block: int
) -> SortedReferences:
    """The references of `groups` in chunks and their distinct slots in blocks.

    Args:
      coefficients: `[tokens, places]`.
      num_slots: rows of the table. Every entry of `slots` is below it, whatever `groups` contains.
      block: distinct slots per block.
    """
    references, places = groups.order.shape[0], coefficients.shape[1]

    def in_order(of_references: jax.Array) -> jax.Array:
        return of_references.reshape(-1).at[groups.order].get(unique_indices=True)

    def tiled(x: jax.Array, tile: int) -> jax.Array:
        return jnp.pad(x, (0, -references % tile)).reshape(-1, 1, tile)

    group = in_order(groups.rank)
    begins = jnp.concatenate([jnp.ones((1,), bool), group[1:] != group[:-1]])
    blocks = pl.cdiv(references, block)
    return SortedReferences(
        tiled(groups.order // places * 2 + begins.astype(jnp.int32), chunk),
        tiled(in_order(coefficients), chunk),
        tiled(jnp.clip(groups.slots, 0, num_slots - 1), block),
        jnp.concatenate([groups.starts[: blocks * block : block], groups.starts[-1:]]),
    )
