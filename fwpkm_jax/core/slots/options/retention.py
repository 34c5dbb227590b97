"""How a write can spare what slots already hold: one small function for each way.

The plain write moves a touched slot by its whole mean error. It does not consider what the slot
held, so one text overwrites what another has written. `hardening` and `relocation` scale the steps
of a chunk by what earlier chunks have written (`step_scales`); `replay` writes some of their tokens
again (`core.slots.options.replay`). None of them needs the values, so that a write's steps are
known as soon as its slots are.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import (
    Queries,
    SlotIds,
    SlotWeights,
    SubKeys,
    TokenWeights,
    ValueTable,
)
from fwpkm_jax.core.chunks import map_groups
from fwpkm_jax.core.slots.options.replay import (
    ReplayedTokens,
    as_chunk,
    no_replayed_tokens,
    remember,
)
from fwpkm_jax.core.slots.values.table import update_norm, value_step
from fwpkm_jax.core.slots.write import SlotAccess, SlotChunk, ValueWrite
from fwpkm_jax.literals import Checked, Natural, NotNegative


@dataclass(frozen=True, kw_only=True)
class Retention(Checked):
    """How a write spares what slots hold; each field alone is off at 0."""

    hardening: NotNegative = 0.0
    """Power of 1 + the write weights that a slot has had, chunk by chunk; divides its steps."""
    relocation: NotNegative = 0.0
    """As `hardening`, but among a token's slots: what held ones are spared, the others take."""
    replay: Natural = 0
    """Tokens written again before every chunk: those of the largest write weights so far."""


class SlotHistory(NamedTuple):
    """What a memory records about its earlier writes. A field that no option needs is None.

    Attributes:
      written: the largest write weight of each chunk's readers, summed, `[slots]`, for `hardening`
        and `relocation`.
      replayed: tokens of earlier chunks, for `replay`.
    """

    written: Float[Array, "*groups slots"] | None = None
    replayed: ReplayedTokens | None = None


def init_history(retention: Retention, keys: SubKeys, values: ValueTable) -> SlotHistory:
    """The history of a table that no chunk has read or written since."""
    counts_writes = retention.hardening or retention.relocation
    return SlotHistory(
        written=jnp.zeros(values.shape[:1], values.dtype) if counts_writes else None,
        replayed=no_replayed_tokens(retention.replay, keys, values) if retention.replay else None,
    )


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
    moved = jnp.sum(squares * yielding, axis=-1, keepdims=True)
    return yielding * whole / jnp.where(moved > 0, moved, 1.0)  # Without weights, 0 and not 0 / 0.


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

    Scales and what is recorded for them have no gradient.

    Args:
      history: from `init_history` or the last write.
      slot_ids: `[tokens, places]`.
      weights: read weights, `[tokens, places]`.
      counted: 1 for tokens whose reads count; others leave no trace in the history.
    """
    # Scales are a schedule of the write; no gradient teaches the model to use up a slot.
    history, weights, write_weight = jax.lax.stop_gradient((history, weights, write_weight))
    reads_counted = jnp.broadcast_to(counted[:, None], slot_ids.shape)
    weight = reads_counted * write_weight[:, None]
    if history.written is None:
        return jnp.ones_like(weight), history
    before = history.written.at[slot_ids].get(mode="promise_in_bounds")
    scales = hardening_scale(before, power=retention.hardening)
    if retention.relocation:
        scales = scales * relocation_scale(weights, before, power=retention.relocation)
    # A slot counts once per chunk, by its strongest reader.
    most = jnp.zeros_like(history.written).at[slot_ids].max(weight, mode="promise_in_bounds")
    return scales, history._replace(written=history.written + most)


def scale_chunks(
    history: SlotHistory,
    access: SlotAccess,
    write_weight: Float[Array, "groups chunks tokens"],
    counted: Float[Array, "groups chunks tokens"],
    *,
    retention: Retention,
) -> tuple[SlotHistory, Float[Array, "groups chunks tokens places"]]:
    """`step_scales` of all chunks: the history after the last one, and all scales.

    Args:
      history: of several memories, leaves `[groups, ...]`.
      access: what the tokens read, leaves `[groups, chunks, tokens, places]`.
      counted: 1 for tokens whose reads count.
    """

    def step(history: SlotHistory, chunk: tuple[Any, ...]) -> tuple[SlotHistory, jax.Array]:
        access, write_weight, counted = chunk
        how: Any = {"write_weight": write_weight, "counted": counted, "retention": retention}
        scales, history = step_scales(history, *access, **how)
        return history, scales

    scan = functools.partial(jax.lax.scan, step)
    return map_groups(scan, history, (access, write_weight, counted))


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
    """`values.table.value_step` with retention, in plain JAX.

    First the stored tokens are written again; the chunk's errors are those after that. Of a chunk
    without tokens that count, all is as before.

    Args:
      values: `[slots, value]`.
      history: from `init_history` or the last write.
      chunk: leaves `[tokens, ...]`.
      find: the slots of stored queries `[stored, heads, key]`.
    """
    before, replay_norm = values, jnp.zeros((), values.dtype)
    if history.replayed is not None:
        stored = as_chunk(history.replayed, beside=chunk)
        places = find(stored.query)
        written = value_step(values, stored, places, write=write)
        replay_norm = update_norm(values, written, places.slot_ids)
        # The norm of the chunk's own step, which starts from the table after the replay.
        before, values = before + (written - values), written
        history = history._replace(replayed=remember(history.replayed, chunk))
    scales, history = step_scales(
        history,
        *access,
        write_weight=chunk.write_weight,
        counted=chunk.counted,
        retention=retention,
    )
    values = value_step(values, chunk, access, write=write, scales=scales)
    norm = jnp.hypot(replay_norm, update_norm(before, values, access.slot_ids))
    return RetentiveStep(values, history, norm)
