"""Weighted sums of rows and inner products with rows, computed by kernels or in plain JAX."""

from typing import NamedTuple

import chex

from fwpkm_jax.core.array_types import (
    SlotIds,
    SlotWeights,
    TokenValues,
    TokenWeights,
    ValueTable,
)
from fwpkm_jax.core.slots.values.rows import dot_rows
from fwpkm_jax.core.slots.values.table import slot_read as weighted_rows
from fwpkm_jax.core.slots.write import PLAIN
from pallas_kernels.dispatch import Backend, Operation
from pallas_kernels.refusals import refuse_rows


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
    *,
    target: TokenValues | None = None,
    write_weight: TokenWeights | None = None,
    backend: Backend = "auto",
) -> SlotRead:
    """Weighted sums of slot values, one per token, and their errors if targets are given.

        output[t] = sum_p weights[t, p] * values[slot_ids[t, p]]
        errors[t] = write_weight[t] * (output[t] - target[t])

    A kernel keeps a token's sum in registers while its rows arrive, so it does not make an array
    `[tokens, places, value]`. It sums places in order, in float32. An array of the table's size is
    made for the gradient only if the caller differentiates with respect to the table.

    Args:
      values: `[slots, value]` float32, on a GPU also bfloat16; value a multiple of 128.
      slot_ids: `[tokens, places]` int32, from 0 and below `slots`; others are not checked, and what
        they read is undefined.
      weights: `[tokens, places]` float32.
      target: `[tokens, value]` float32, or None.
      write_weight: `[tokens]` float32; given with `target` only.
      backend: as of `dispatch.Operation.choose`, errors included.

    Raises:
      ValueError: only one of `target` and `write_weight` is given.
    """
    if (target is None) != (write_weight is None):
        raise ValueError("target and write_weight go together: pass both or neither.")
    chex.assert_equal_shape([slot_ids, weights])
    chosen = SLOT_READ.choose(backend, values, weights, target, write_weight)
    if chosen != "reference":
        from pallas_kernels.row_gradients import read

        return SlotRead(*read(chosen, values, slot_ids, weights, target, write_weight))
    output = weighted_rows(values.astype(weights.dtype), slot_ids, weights)
    if target is None or write_weight is None:
        return SlotRead(output, None)
    return SlotRead(output, PLAIN.error(output, target, write_weight[:, None]))


def slot_dot(
    values: ValueTable, slot_ids: SlotIds, vectors: TokenValues, *, backend: Backend = "auto"
) -> SlotWeights:
    """Inner products `[tokens, places]` of each token's vector with the rows that it reads.

        dot[t, p] = <values[slot_ids[t, p]], vectors[t]>

    If `vectors` is the cotangent of `slot_read`'s output, this is the cotangent of its weights.

    Args:
      values: `[slots, value]` float32, on a GPU also bfloat16; value a multiple of 128.
      slot_ids: `[tokens, places]` int32, as in `slot_read`.
      vectors: `[tokens, value]` float32.
      backend: as of `dispatch.Operation.choose`, errors included.
    """
    chex.assert_equal_shape_prefix([slot_ids, vectors], 1)
    chosen = SLOT_DOT.choose(backend, values, vectors)
    if chosen != "reference":
        from pallas_kernels.row_gradients import dot

        return dot(chosen, values, slot_ids, vectors)
    return dot_rows(values.astype(vectors.dtype), slot_ids, vectors)


_SPECS = "pallas_kernels.slot_read.specs"
SLOT_READ = Operation("slot_read", refuse_rows, check=f"{_SPECS}:READS.check")
SLOT_DOT = Operation("slot_dot", refuse_rows, check=f"{_SPECS}:DOTS.check")
