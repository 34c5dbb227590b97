"""One value step of a chunk in plain JAX: its errors, what comes before them, and its write."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import (
    Queries,
    SlotIds,
    SlotWeights,
    TokenValues,
    TokenWeights,
    ValueTable,
)
from fwpkm_jax.core.slots.chunk import SlotAccess, SlotChunk
from fwpkm_jax.core.slots.options.replay import as_chunk, remember
from fwpkm_jax.core.slots.options.retention import (
    Retention,
    SlotHistory,
    decay,
    settle,
    step_scales,
    step_with_momentum,
    surprise_weights,
)
from fwpkm_jax.core.slots.values.grouping import group_slots, reference_counts
from fwpkm_jax.core.slots.values.table import slot_read, slot_write, update_norm
from fwpkm_jax.core.slots.write import ValueWrite


def value_step(
    values: ValueTable, chunk: SlotChunk, access: SlotAccess, *, write: ValueWrite
) -> ValueTable:
    """The table after a write of the errors of what a chunk reads from it.

    Args:
      values: `[slots, value]`.
      chunk: leaves `[tokens, ...]`.
      access: the slots that it reads.
      write: its formulas.
    """
    errors = write.error(slot_read(values, *access), chunk.target, chunk.error_weight[:, None])
    return slot_write(values, *access, errors, counted=chunk.counted, write=write)


class RetentiveStep(NamedTuple):
    """What a value step leaves that spares what slots hold.

    Attributes:
      values: `[slots, value]`.
      history: of the slots.
      update_norm: Euclidean norm of the change of the table; a replay counts as a step of its own,
        so that with one this is the root of the sum of two squares.
    """

    values: ValueTable
    history: SlotHistory
    update_norm: Float[Array, ""]


def retentive_step(
    values: ValueTable,
    history: SlotHistory,
    chunk: SlotChunk,
    access: SlotAccess,
    *,
    find: Callable[[Queries], SlotAccess],
    write: ValueWrite,
    retention: Retention,
) -> RetentiveStep:
    """`value_step` with retention.

    First the chunk's slots take back what does not last, then the stored tokens are written again.
    The chunk's errors are those after that. Of a chunk without tokens that count, all is as before.

    Args:
      values: `[slots, value]`.
      history: from `core.slots.options.retention.init_history` or the last write.
      chunk: leaves `[tokens, ...]`.
      access: the slots that it reads.
      find: the slots of stored queries `[stored, heads, key]`.
      write: its formulas.
      retention: what to spare.
    """
    before, replay_norm = values, jnp.zeros((), values.dtype)
    if history.lasting is not None:
        values = settle(values, history.lasting, access.slot_ids, chunk.counted)
    if history.replayed is not None:
        again = as_chunk(history.replayed, beside=chunk)
        places = find(again.query)
        written = value_step(values, again, places, write=write)
        replay_norm = update_norm(values, written, places.slot_ids)
        before, values = before + (written - values), written
        history = history._replace(replayed=remember(history.replayed, chunk))
    read = slot_read(values, *access)
    errors = write.error(read, chunk.target, chunk.error_weight[:, None])
    if retention.surprise:
        gap = write.error(read, chunk.target, jnp.ones((1, 1), read.dtype))
        weights = surprise_weights(gap, chunk.write_weight, power=retention.surprise)
        errors = weights[:, None] * errors
    values, history = retentive_write(
        values,
        history,
        *access,
        errors,
        write_weight=chunk.write_weight,
        counted=chunk.counted,
        write=write,
        retention=retention,
    )
    norm = jnp.hypot(replay_norm, update_norm(before, values, access.slot_ids))
    return RetentiveStep(values, history, norm)


def retentive_write(
    values: ValueTable,
    history: SlotHistory,
    slot_ids: SlotIds,
    weights: SlotWeights,
    errors: TokenValues,
    *,
    write_weight: TokenWeights,
    counted: TokenWeights,
    write: ValueWrite,
    retention: Retention,
) -> tuple[ValueTable, SlotHistory]:
    """`table.slot_write` with retention: the table and its history after one chunk.

        s[i] = -step_size / n[i] * sum of scale * weight * error + momentum * last s[i]
        V[i] <- (1 - write_decay) * V[i] + s[i]
        L[i] <- L[i] + consolidation * s[i]

    for every slot i that the counted tokens read, n[i] times, with the scales of `step_scales`. No
    other row of the table or of the steps is touched; `protection` averages and `hardening` adds
    one number per slot of the table.

    Args:
      values: `[slots, value]`.
      history: from `init_history` or the last write.
      slot_ids: `[tokens, places]`.
      weights: read weights, `[tokens, places]`.
      errors: weight of the token's write times (prediction - target), `[tokens, value]`; with
        `consolidation` the prediction is that of the table after `settle`.
      write_weight: of each token, for `step_scales`.
      counted: 1 for tokens whose reads count.
      write: its formulas.
      retention: what to spare. `surprise` is in the errors already.
    """
    groups = group_slots(slot_ids, num_slots=values.shape[0])
    distinct = min(slot_ids.size, values.shape[0])
    slots = groups.slots[:distinct]

    def row_sums(x: jax.Array) -> jax.Array:
        """`[tokens, places, ...]` summed over the references of each distinct slot."""
        rank = groups.rank.reshape(-1)
        return jax.ops.segment_sum(x.reshape(rank.size, *x.shape[2:]), rank, distinct)

    def rows_of(table: jax.Array) -> jax.Array:
        return table.at[slots].get(mode="clip")

    def put(table: jax.Array, rows: jax.Array) -> jax.Array:
        return table.at[slots].set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)

    counts = reference_counts(groups, counted)
    scales, history = step_scales(
        history, slot_ids, weights, write_weight=write_weight, counted=counted, retention=retention
    )
    shares = scales * write.steps(weights, counts)
    steps = row_sums(shares[:, :, None] * errors[:, None, :])
    new_reads = row_sums(jnp.broadcast_to(counted[:, None], slot_ids.shape))
    touched = (new_reads > 0)[:, None]
    last_steps = history.steps
    if last_steps is not None:
        last = rows_of(last_steps)
        with_momentum = step_with_momentum(steps, last, momentum=retention.momentum)
        steps = jnp.where(touched, with_momentum, steps)
        last_steps = put(last_steps, jnp.where(touched, steps, last))
    old = rows_of(values)
    # Where no token counts the step is 0, as in `slot_write`; its gradient is not.
    values = put(values, jnp.where(touched, decay(old, share=retention.write_decay), old) + steps)
    lasting = history.lasting
    if lasting is not None:
        kept = rows_of(lasting)
        lasting = put(lasting, jnp.where(touched, kept + retention.consolidation * steps, kept))
    return values, history._replace(steps=last_steps, lasting=lasting)
