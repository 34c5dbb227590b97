"""How a write can spare what slots already hold: one small function for each way.

The plain write moves a touched slot by its whole mean error. It does not consider what the slot
held or how often it was read, so one text overwrites what another has written. Each function here
changes one factor of that write; `core.slots.values.step.retentive_write` combines them.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import (
    SlotIds,
    SlotWeights,
    SubKeys,
    TokenValues,
    TokenWeights,
    ValueTable,
)
from fwpkm_jax.core.slots.options.replay import ReplayedTokens, no_replayed_tokens
from fwpkm_jax.core.slots.values.grouping import SlotGroups, group_slots, reference_counts


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
    strength: float = 0.0
    """Power of a token's write weight over the largest that wrote the slot before; at most 1."""
    hardening: float = 0.0
    """Power of 1 + the write weights that a slot has had, chunk by chunk; divides its steps."""
    relocation: float = 0.0
    """As `hardening`, but among a token's slots: what held ones are spared, the others take."""
    common: float = 0.0
    """Share of a chunk's slots that it does not write: the least special to it, by TF-IDF."""
    replay: int = 0
    """Tokens written again before every chunk: those of the largest write weights so far."""
    consolidation: float = 0.0
    """Share of a slot's steps that lasts; its next write takes the rest back. Costs a table."""

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ValueError(f"{field.name}={value} must be at least 0; 0 is off.")
        for name in ("write_decay", "common", "consolidation"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)} is a share and at most 1.")
        if self.momentum >= 1:
            raise ValueError(
                f"momentum={self.momentum} must be below 1, or steps grow without bound."
            )

    @property
    def foreseen(self) -> bool:
        """Whether a write's steps are known before values are read, so that two phases can run."""
        return not (self.counts_steps or self.surprise)

    @property
    def counts_steps(self) -> bool:
        """Whether a second step of the same chunk would count as one of a chunk of its own."""
        return bool(self.write_decay or self.momentum or self.consolidation)


class SlotHistory(NamedTuple):
    """What a memory records about its earlier writes. A field that no option needs is None.

    Attributes:
      steps: each slot's last step, `[slots, value]`, for `momentum`.
      reads: how often each slot was read, `[slots]`, for `protection`.
      strongest: the largest write weight of each slot's readers so far, `[slots]`, for `strength`.
      written: the largest write weight of each chunk's readers, summed, `[slots]`, for `hardening`
        and `relocation`.
      chunks_read: how many chunks read each slot, `[slots]`, for `common`.
      chunks: how many chunks there were, for `common`.
      replayed: tokens of earlier chunks, for `replay`.
      lasting: what each slot goes back to before it is written, `[slots, value]`, for
        `consolidation`.
    """

    steps: Float[Array, "slots value"] | None = None
    reads: Float[Array, " slots"] | None = None
    strongest: Float[Array, " slots"] | None = None
    written: Float[Array, " slots"] | None = None
    chunks_read: Float[Array, " slots"] | None = None
    chunks: Float[Array, ""] | None = None
    replayed: ReplayedTokens | None = None
    lasting: Float[Array, "slots value"] | None = None


def init_history(retention: Retention, keys: SubKeys, values: ValueTable) -> SlotHistory:
    """The history of a table that no chunk has read or written since."""

    def zeros(option: float) -> Float[Array, " slots"] | None:
        return jnp.zeros(values.shape[:1], values.dtype) if option else None

    return SlotHistory(
        steps=jnp.zeros_like(values) if retention.momentum else None,
        reads=zeros(retention.protection),
        strongest=zeros(retention.strength),
        written=zeros(retention.hardening or retention.relocation),
        chunks_read=zeros(retention.common),
        chunks=jnp.zeros((), values.dtype) if retention.common else None,
        replayed=no_replayed_tokens(retention.replay, keys, values) if retention.replay else None,
        lasting=jnp.copy(values) if retention.consolidation else None,
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
    reads: Float[Array, "*places"], mean: Float[Array, ""], *, power: float
) -> Float[Array, "*places"]:
    """Scale of a slot's steps, `min(1, (mean / reads)^power)`.

    Slots that were read more often than the average, before this write, are written less.
    """
    most = jnp.maximum(reads, mean)
    return jnp.where(most > 0, mean / jnp.where(most > 0, most, 1.0), 1.0) ** power


def strength_scale(
    weight: Float[Array, "*places"], strongest: Float[Array, "*places"], *, power: float
) -> Float[Array, "*places"]:
    """Scale of each place's step, `min(1, (write weight / strongest before)^power)`.

    A token that writes as strongly as any before it writes in full; a weaker one hardly moves what
    a stronger one has written.
    """
    most = jnp.maximum(weight, strongest)
    return jnp.where(most > 0, weight / jnp.where(most > 0, most, 1.0), 1.0) ** power


def hardening_scale(written: jax.Array, *, power: float) -> jax.Array:
    """Scale of a slot's steps, `(1 + written)^-power`: the more it holds, the less it moves.

    With power 1 a slot that is always written in full is the running mean of its targets.

    References: the accumulated steps of recursive least squares, diagonal and per slot.
    """
    return (1.0 + written) ** -power


def relocation_scale(weights: SlotWeights, written: SlotWeights, *, power: float) -> SlotWeights:
    """Scale of each place's step, `c (1 + written)^-power`; c lets the token learn as much.

    A write moves the token's prediction by the sum over its places of weight^2 times the scale,
    which is the same as without scales. Slots that hold little take what the others are spared.

    References: the gain of recursive least squares with a diagonal covariance.
    """
    yielding = hardening_scale(written, power=power)
    squares = weights**2
    whole = jnp.sum(squares, axis=-1, keepdims=True)
    return yielding * whole / jnp.sum(squares * yielding, axis=-1, keepdims=True)


def special_slots(
    groups: SlotGroups, counts: SlotWeights, chunks_read: jax.Array, chunks: jax.Array, share: float
) -> Float[Array, "tokens places"]:
    """1 where a place's slot is special to this chunk, 0 for the `share` that are least so.

    The score of a slot is `reads in this chunk * log((chunks + 1) / (chunks that read it + 1))`.
    Slots with the score at the bound are kept, so that before any chunk all are.

    Args:
      groups: the chunk's references.
      counts: reads of each place's slot by the chunk's counted tokens.
      chunks_read: how many chunks before read each place's slot, `[tokens, places]`.
      chunks: how many chunks there were before.
      share: of the distinct slots that counted tokens read.

    References: sparse memory finetuning, Lin and others 2025, arXiv:2510.15103.
    """
    scores = counts * jnp.log((chunks + 1.0) / (chunks_read + 1.0))
    scores = jnp.where(counts > 0, scores, jnp.inf)
    # One score per distinct slot: the others' are infinite and stand behind in ascending order.
    distinct = jnp.full((groups.slots.size,), jnp.inf, scores.dtype)
    distinct = jnp.sort(distinct.at[groups.rank.reshape(-1)].set(scores.reshape(-1)))
    written = jnp.sum(jnp.isfinite(distinct).astype(scores.dtype))
    left_out = jnp.floor(share * written).astype(jnp.int32)
    bound = jnp.append(distinct, jnp.inf)[left_out]
    return (scores >= bound).astype(scores.dtype)


def step_scales(
    history: SlotHistory,
    slot_ids: SlotIds,
    weights: SlotWeights,
    *,
    write_weight: TokenWeights,
    counted: TokenWeights,
    retention: Retention,
) -> tuple[Float[Array, "tokens places"], SlotHistory]:
    """What multiplies each place's step, and the history after this chunk.

    These are the ways that need no values, so they are known as soon as all slots are. Scales and
    what is recorded for them have no gradient.

    Args:
      history: from `init_history` or the last write.
      slot_ids: `[tokens, places]`.
      weights: read weights, `[tokens, places]`.
      write_weight: of each token.
      counted: 1 for tokens whose reads count; others leave no trace in the history.
      retention: what to spare.
    """
    tables = {"steps": history.steps, "lasting": history.lasting}
    history, weights, write_weight = jax.lax.stop_gradient(
        (history._replace(steps=None, lasting=None), weights, write_weight)
    )
    reads_counted = jnp.broadcast_to(counted[:, None], slot_ids.shape)
    weight = reads_counted * write_weight[:, None]
    scales = jnp.ones_like(weight)

    def of_places(record: jax.Array) -> jax.Array:
        return record.at[slot_ids].get(mode="promise_in_bounds")

    if history.reads is not None:
        before, mean = of_places(history.reads), jnp.mean(history.reads)
        scales = scales * protection_scale(before, mean, power=retention.protection)
        reads = history.reads.at[slot_ids].add(reads_counted, mode="promise_in_bounds")
        history = history._replace(reads=reads)
    if history.strongest is not None:
        before = of_places(history.strongest)
        scales = scales * strength_scale(weight, before, power=retention.strength)
        strongest = history.strongest.at[slot_ids].max(weight, mode="promise_in_bounds")
        history = history._replace(strongest=strongest)
    if history.written is not None:
        before = of_places(history.written)
        scales = scales * hardening_scale(before, power=retention.hardening)
        if retention.relocation:
            scales = scales * relocation_scale(weights, before, power=retention.relocation)
        most = jnp.zeros_like(history.written).at[slot_ids].max(weight, mode="promise_in_bounds")
        history = history._replace(written=history.written + most)
    if history.chunks_read is not None:
        assert history.chunks is not None
        groups = group_slots(slot_ids, num_slots=history.chunks_read.shape[0])
        counts, before = reference_counts(groups, counted), of_places(history.chunks_read)
        scales = scales * special_slots(groups, counts, before, history.chunks, retention.common)
        # Every place of a slot sets the same number.
        after = jnp.where(counts > 0, before + 1.0, before)
        after = history.chunks_read.at[slot_ids].set(after, mode="promise_in_bounds")
        chunks = history.chunks + jnp.max(counted)
        history = history._replace(chunks_read=after, chunks=chunks)
    return scales, history._replace(**tables)


def step_with_momentum(step: jax.Array, last: jax.Array, *, momentum: float) -> jax.Array:
    """Heavy-ball momentum: this step plus a share of the slot's last step, however old that is."""
    return step + momentum * last


def settle(
    values: ValueTable,
    lasting: Float[Array, "slots value"],
    slot_ids: SlotIds,
    counted: TokenWeights,
) -> ValueTable:
    """The table with what lasts in every slot that counted tokens read.

    Args:
      values: `[slots, value]`.
      lasting: likewise.
      slot_ids: `[tokens, places]`.
      counted: 1 for tokens whose reads count.

    References: fast and slow weights, Hinton and Plaut 1987; sparse memory finetuning, Lin and
    others 2025, arXiv:2510.15103, for slow values that learn sparsely by SGD.
    """
    read = jnp.where(counted[:, None] > 0, slot_ids, values.shape[0])
    # Every place of a slot sets the same row.
    return values.at[read].set(lasting.at[slot_ids].get(mode="promise_in_bounds"), mode="drop")


def decay(rows: jax.Array, *, share: float) -> jax.Array:
    """Rows after the decay that precedes a write."""
    return (1.0 - share) * rows
