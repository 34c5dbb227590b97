"""Gated DeltaNet with one write strength per value channel."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput, chunk_recurrence
from fwpkm_jax.rules.matrix.base import (
    Form,
    LocalLoss,
    Starts,
    State,
    Tokens,
    forgotten,
    given,
    squared,
)
from fwpkm_jax.rules.matrix.gated_deltanet import AbstractGatedDelta


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetChannels(AbstractGatedDelta):
    """A decay per token and head, then a delta step of `strength` (β) per value channel.

    Channels then no longer share the triangular system of a chunk. `chunked` solves one for each:
    to the shared algorithm every channel is a memory of its own, so that the products cost as many
    times more as a value is wide. The result is exact.

    References: Yang et al. 2024, arXiv:2412.06464, of the rule with one strength per head.
    """

    form: ClassVar[Form] = Form(
        name="Gated DeltaNet, β per value channel",
        right=r"$\alpha_t(I - \beta_{t,i} kk^\top)$ in row $i$",
        written=r"$(\beta_t\circ v)k^\top$",
        loss=r"$\tfrac{1}{2\alpha_t}\lVert \sqrt{\beta_t}\circ(v - \alpha_t Wk)\rVert^2 "
        r"+ \tfrac{1-\alpha_t}{2}\lVert W\rVert^2$",
        source="arXiv:2412.06464",
    )
    decay: ClassVar = "head"
    strength: ClassVar = "value"
    delta: ClassVar = True

    def write(self, state: State, token: Tokens) -> State:
        state = jnp.exp(given(token.log_decay)) * state
        error = given(token.strength) * (token.value - token.key @ state)
        return state + jnp.outer(token.key, error)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        share = jnp.exp(given(token.log_decay))

        def loss(matrix):
            error = jnp.square(token.value - share * (token.key @ matrix))
            # Each channel's error has a weight of its own, before the sum.
            weighed = jnp.sum(given(token.strength) * error) / 2
            return weighed / share + forgotten(token.log_decay) * squared(matrix)

        return (LocalLoss(loss),)

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        return chunks_by_channel(tokens, state, starts, self.chunk_size)


def chunks_by_channel(
    tokens: Tokens, state: State, starts: Starts, chunk_size: int
) -> RecurrenceOutput:
    """Delta steps with a strength, or also a decay, per value channel.

    A value channel with a strength of its own is a memory of values of width 1, so channels take
    the place of heads.
    """
    batch, length, heads, channels = tokens.value.shape

    def of_channels(x: Array) -> Array:
        """`[batch, length, heads, ...]` to `[batch, length, heads * channels, ...]`."""
        return jnp.repeat(x, channels, axis=2)

    log_decay = given(tokens.log_decay)
    if log_decay.ndim == 3:
        log_decay = jnp.broadcast_to(log_decay[..., None], tokens.value.shape)
    # [batch, heads, key, value] to a memory [key, 1] for each value channel.
    start = jnp.moveaxis(state, 3, 2).reshape(batch, heads * channels, -1, 1)
    output, end = chunk_recurrence(
        of_channels(tokens.query),
        of_channels(tokens.key),
        tokens.value.reshape(batch, length, -1, 1),
        log_decay=log_decay.reshape(batch, length, -1),
        beta=given(tokens.strength).reshape(batch, length, -1),
        initial_state=start,
        starts=starts,
        chunk_size=chunk_size,
    )
    end = jnp.moveaxis(end.reshape(batch, heads, channels, -1), 2, 3)
    return RecurrenceOutput(output.reshape(tokens.value.shape), end)
