"""RWKV-7: a decay per key channel, and a delta step whose strength differs between channels."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.core.numerics import unit_normalize
from fwpkm_jax.core.recurrence.decay_starts import logit
from fwpkm_jax.core.recurrence.linear_recurrence import Erasure, RecurrenceOutput
from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LearnedGates,
    LocalLoss,
    Starts,
    State,
    Tokens,
    forgotten,
    given,
    squared,
)

_RATE = 0.6065306597126334  # exp(-1/2), the largest decay of a token; published.


@dataclass(frozen=True, kw_only=True)
class RWKV7(AbstractMatrixRule):
    """Erases along the unit key κ what κ finds, by `strength` (a) per key channel, and adds v a∘k.

    One gradient step whose size differs between key channels, which makes the transition diagonal
    plus low rank. The rule alone: the published layer also mixes each token with the one before,
    scales the keys that erase, learns how much of a multiplies the keys that add, and adds its
    value to what is read.

    References: Peng et al. 2025, arXiv:2503.14456.
    """

    form: ClassVar[Form] = Form(
        name="RWKV-7",
        right=r"$\mathrm{Diag}(\alpha_t) - \kappa(a_t\circ\kappa)^\top$, "
        r"$\kappa = k/\lVert k\rVert$",
        written=r"$v(a_t\circ k)^\top$",
        loss=r"$\tfrac12\lVert \lVert k\rVert v - W\kappa\rVert^2 "
        r"+ \tfrac12\lVert W\,\mathrm{Diag}(\sqrt{(1-\alpha_t)/a_t})\rVert^2$",
        step_size="$a_t$ per key channel",
        source="arXiv:2503.14456",
    )
    decay: ClassVar = "key"
    strength: ClassVar = "key"
    transition: ClassVar = "mixes_keys"
    learned_gates: ClassVar = LearnedGates(
        decay=True,
        strength=True,
        decay_bias=-4.0,
        decay_of_step=lambda step: logit(step / _RATE),
    )

    chunk_size: Count = 16  # As GLA's.

    def write(self, state: State, token: Tokens) -> State:
        found, at, key = _directions(token)
        kept = jnp.exp(given(token.log_decay))[:, None] * state
        return kept - jnp.outer(at, found @ state) + jnp.outer(key, token.value)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        unit, strength = unit_normalize(token.key), given(token.strength)[:, None]
        # |k| v, so that the error's step writes a k v as published.
        value = (token.key @ unit) / (unit @ unit) * token.value
        forget = forgotten(token.log_decay)[:, None] / strength

        def loss(matrix):
            return squared(value - unit @ matrix) + jnp.sum(forget * jnp.square(matrix)) / 2

        return (LocalLoss(loss, strength),)

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        *erasure, key = _directions(tokens)
        return self.recurrence(tokens._replace(key=key), state, starts, erasure=Erasure(*erasure))

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        log_decay = -_RATE * jax.nn.sigmoid(given(inputs.decay))
        return log_decay, jax.nn.sigmoid(given(inputs.strength))


def _directions(tokens: Tokens) -> tuple[Array, Array, Array]:
    """The directions of the read and the erasure, and the key under which the value is added."""
    strength, unit = given(tokens.strength), unit_normalize(tokens.key)
    return unit, strength * unit, strength * tokens.key
