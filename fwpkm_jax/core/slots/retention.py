"""How a write can spare what slots already hold: one small function for each way.

The plain write moves a touched slot by its whole mean error. It does not consider what the slot
held or how often it was read, so one text overwrites what another has written. Each function here
changes one factor of that write; `retentive_write` combines them.
"""

from dataclasses import dataclass
from typing import NamedTuple

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
from fwpkm_jax.core.slots.grouping import group_slots, reference_counts
from fwpkm_jax.core.slots.table import write_steps


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How a write spares what slots hold; each field alone is off at 0."""

    write_decay: float = 0.0
    """Share of a touched slot's old value that a write takes away first, 0 to 1."""
    momentum: float = 0.0
    """Share of a slot's last step taken again when it is next touched, below 1. Costs a table."""
    surprise: float = 0.0
    """Power of a token's error over the chunk's, which weighs its write by at most 1."""
    protection: float = 0.0
    """Power of the mean number of reads over a slot's, which scales its steps by at most 1."""

    def __post_init__(self):
        for name in ("write_decay", "momentum", "surprise", "protection"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0; 0 is off.")
        if self.write_decay > 1:
            raise ValueError(f"write_decay={self.write_decay} is a share and at most 1.")
        if self.momentum >= 1:
            raise ValueError(
                f"momentum={self.momentum} must be below 1, or steps grow without bound."
            )


class SlotHistory(NamedTuple):
    """What a memory records about its earlier writes. A field that no option needs is None.

    Attributes:
      steps: each slot's last step, `[slots, value]`, for `momentum`.
      reads: how often each slot was read, `[slots]`, for `protection`.
    """

    steps: Float[Array, "slots value"] | None
    reads: Float[Array, " slots"] | None


def init_history(retention: Retention, values: ValueTable) -> SlotHistory:
    """The history of a table that has never been read or written."""
    return SlotHistory(
        steps=jnp.zeros_like(values) if retention.momentum else None,
        reads=jnp.zeros(values.shape[:1], values.dtype) if retention.protection else None,
    )


def surprise_weights(
    errors: TokenValues, write_weight: TokenWeights, *, power: float
) -> TokenWeights:
    """Weight of each token's error, `min(1, (|error| / rms of the chunk's errors)^power)`.

    Tokens that the memory already predicts better than the others are written less. The weight has
    no gradient.

    Args:
      errors: prediction minus target, `[tokens, value]`.
      write_weight: of each token in the chunk's mean; 0 for tokens that write nothing.
      power: 0 weighs all by 1.
    """
    squares = jnp.sum(errors**2, axis=-1)
    total = jnp.sum(write_weight)
    mean = jnp.sum(write_weight * squares) / jnp.where(total > 0, total, 1.0)
    relative = jnp.minimum(1.0, squares / jnp.where(mean > 0, mean, 1.0))
    return jax.lax.stop_gradient(relative ** (0.5 * power))


def protection_scale(
    reads: Float[Array, " rows"], mean: Float[Array, ""], *, power: float
) -> Float[Array, " rows"]:
    """Scale of a slot's steps, `min(1, (mean / reads)^power)`.

    Slots that were read more often than the average, before this write, are written less.
    """
    most = jnp.maximum(reads, mean)
    return jnp.where(most > 0, mean / jnp.where(most > 0, most, 1.0), 1.0) ** power


def step_with_momentum(step: jax.Array, last: jax.Array, *, momentum: float) -> jax.Array:
    """Heavy-ball momentum: this step plus a share of the slot's last step, however old that is."""
    return step + momentum * last


def decay(rows: jax.Array, *, share: float) -> jax.Array:
    """Rows after the decay that precedes a write."""
    return (1.0 - share) * rows


def retentive_write(
    values: ValueTable,
    history: SlotHistory,
    slot_ids: SlotIds,
    weights: SlotWeights,
    errors: TokenValues,
    *,
    counted: TokenWeights,
    step_size: float,
    retention: Retention,
) -> tuple[ValueTable, SlotHistory]:
    """`table.slot_write` with retention: the table and its history after one chunk.

        s[i] = -scale[i] * step_size / n[i] * sum of weight * error + momentum * last s[i]
        V[i] <- (1 - write_decay) * V[i] + s[i]

    for every slot i that the counted tokens read, n[i] times. No other row of the table or of the
    steps is touched; `protection` averages one number per slot of the table.

    Args:
      values: `[slots, value]`.
      history: from `init_history` or the last write.
      slot_ids: `[tokens, places]`.
      weights: read weights, `[tokens, places]`.
      errors: weight of the token's write times (prediction - target), `[tokens, value]`.
      counted: 1 for tokens whose reads count.
      step_size: multiplies a slot's mean.
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
    shares = write_steps(weights, counts, step_size=step_size)
    steps = row_sums(shares[:, :, None] * errors[:, None, :])
    new_reads = row_sums(jnp.broadcast_to(counted[:, None], slot_ids.shape))
    touched = (new_reads > 0)[:, None]
    reads = history.reads
    if reads is not None:
        before = rows_of(reads)
        scale = protection_scale(before, jnp.mean(reads), power=retention.protection)
        steps = scale[:, None] * steps
        reads = put(reads, before + new_reads)
    last_steps = history.steps
    if last_steps is not None:
        last = rows_of(last_steps)
        steps = step_with_momentum(steps, last, momentum=retention.momentum)
        last_steps = put(last_steps, jnp.where(touched, steps, last))
    old = rows_of(values)
    new = decay(old, share=retention.write_decay) + steps
    return put(values, jnp.where(touched, new, old)), SlotHistory(last_steps, reads)
