"""One chunk's reads from and writes to a table of slot values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import (
    SlotIds,
    SlotWeights,
    TokenValues,
    TokenWeights,
    ValueTable,
)
from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.slots.write import SlotAccess, SlotChunk, ValueWrite


def slot_read(values: ValueTable, slot_ids: SlotIds, weights: SlotWeights) -> TokenValues:
    """Weighted sums of slot values, one per token (Eq. 11).

    Args:
      values: `[slots, value]`.
      slot_ids: `[tokens, places]`, each below `slots`.
      weights: `[tokens, places]`.
    """
    check_arrays(
        values=(values, "float slots value"),
        slot_ids=(slot_ids, "int tokens places"),
        weights=(weights, "float tokens places"),
    )
    rows = values.at[slot_ids].get(mode="promise_in_bounds")
    return jnp.einsum("tp,tpv->tv", weights, rows, precision=jax.lax.Precision.HIGHEST)


def slot_counts(
    slot_ids: SlotIds, counted: TokenWeights, *, num_slots: int
) -> Float[Array, "tokens places"]:
    """How often the chunk read each place's slot, counting the tokens with `counted` = 1."""
    counters = jnp.zeros((num_slots,), counted.dtype)
    increments = jnp.broadcast_to(counted[:, None], slot_ids.shape)
    counters = counters.at[slot_ids].add(increments, mode="promise_in_bounds")
    return counters.at[slot_ids].get(mode="promise_in_bounds")


def slot_write(
    values: ValueTable,
    slot_ids: SlotIds,
    weights: SlotWeights,
    errors: TokenValues,
    *,
    counted: TokenWeights,
    write: ValueWrite,
    scales: SlotWeights | None = None,
) -> ValueTable:
    """The table after one write, in plain JAX.

    Untouched rows are neither read nor written, and in a loop the table is updated in place,
    unless the write is dense: it then needs the whole gradient and a pass over the table.

    Args:
      values: `[slots, value]`.
      slot_ids: `[tokens, places]`.
      weights: read weights, `[tokens, places]`.
      errors: from `write.error`, `[tokens, value]`.
      counted: 1 for tokens whose reads count in n, `[tokens]`.
      scales: multiply the step of each place, `[tokens, places]`; None: 1.
    """
    check_arrays(
        values=(values, "float slots value"),
        slot_ids=(slot_ids, "int tokens places"),
        weights=(weights, "float tokens places"),
        errors=(errors, "float tokens value"),
        counted=(counted, "float tokens"),
    )
    counts = slot_counts(slot_ids, counted, num_slots=values.shape[0])
    steps = write.steps(weights, counts)
    if scales is not None:
        steps = scales * steps
    gradients = -steps[:, :, None] * errors[:, None, :]
    # Rows that no token read stay where they are.
    if write.is_sparse:
        return values.at[slot_ids].add(-write.learning_rate * gradients, mode="promise_in_bounds")
    gradient = jnp.zeros_like(values).at[slot_ids].add(gradients, mode="promise_in_bounds")
    return write.dense_step(values, gradient)


def value_step(
    values: ValueTable,
    chunk: SlotChunk,
    access: SlotAccess,
    *,
    write: ValueWrite,
    scales: SlotWeights | None = None,
) -> ValueTable:
    """The table after a write of the errors of what a chunk reads from it.

    Args:
      values: `[slots, value]`.
      chunk: leaves `[tokens, ...]`.
      scales: as in `slot_write`.
    """
    errors = write.error(slot_read(values, *access), chunk.target, chunk.error_weight[:, None])
    return slot_write(values, *access, errors, counted=chunk.counted, write=write, scales=scales)


def update_norm(before: ValueTable, after: ValueTable, slot_ids: SlotIds) -> Float[Array, ""]:
    """Euclidean norm of the table's change, from the touched rows alone.

    Args:
      before: `[slots, value]`.
      after: the table after a write.
      slot_ids: the slots that it touched, `[tokens, places]`.
    """
    change = after.at[slot_ids].get(mode="promise_in_bounds") - before.at[slot_ids].get(
        mode="promise_in_bounds"
    )
    squares = jnp.sum(change**2, axis=-1)
    # A row read n times appears n times.
    ones = jnp.ones(slot_ids.shape[:1], squares.dtype)
    return jnp.sqrt(jnp.sum(squares / slot_counts(slot_ids, ones, num_slots=before.shape[0])))
