"""The definition of `slot_read` and `slot_dot` in plain JAX."""

from typing import NamedTuple

from fwpkm_jax.core.array_types import (
    SlotIds,
    SlotWeights,
    TokenValues,
    TokenWeights,
    ValueTable,
)
from fwpkm_jax.core.slots.values import table as memory
from fwpkm_jax.core.slots.values.rows import dot_rows
from fwpkm_jax.core.slots.write import PLAIN


class SlotRead(NamedTuple):
    """What tokens read, and its weighted difference from their targets.

    Attributes:
      output: weighted sums of slot values, `[tokens, value]`.
      errors: write weight times (output - target), `[tokens, value]`; None without targets.
    """

    output: TokenValues
    errors: TokenValues | None


def slot_read(
    values: ValueTable,
    slot_ids: SlotIds,
    weights: SlotWeights,
    target: TokenValues | None,
    write_weight: TokenWeights | None,
) -> SlotRead:
    output = memory.slot_read(values.astype(weights.dtype), slot_ids, weights)
    if target is None or write_weight is None:
        return SlotRead(output, None)
    return SlotRead(output, PLAIN.error(output, target, write_weight[:, None]))


def slot_dot(values: ValueTable, slot_ids: SlotIds, vectors: TokenValues) -> SlotWeights:
    return dot_rows(values.astype(vectors.dtype), slot_ids, vectors)
