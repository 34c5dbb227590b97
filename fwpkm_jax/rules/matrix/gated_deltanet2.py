"""Gated DeltaNet-2: a decay per key channel, one gate for what is erased, one for what is added."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.core.recurrence.linear_recurrence import Erasure, RecurrenceOutput
from fwpkm_jax.core.recurrence.transition import Mixing, beside_identity
from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import (
    Form,
    GateInputs,
    LocalLoss,
    Starts,
    State,
    Tokens,
    forgotten,
    given,
    squared,
)
from fwpkm_jax.rules.matrix.gated_deltanet import AbstractGatedDelta, projected_decay


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet2(AbstractGatedDelta):
    """KDA whose delta step erases what b∘k reads and adds w∘v, both under the key k.

    `strength` holds b, a number per key channel, then w, a number per value channel. With both the
    same number everywhere it is KDA. The published layer projects to b and w directly, where this
    one goes by way of the low rank of all gates per channel.

    References: arXiv:2605.22791.
    """

    form: ClassVar[Form] = Form(
        name="Gated DeltaNet-2",
        right=r"$\mathrm{Diag}(\alpha_t)(I - (b_t\circ k)k^\top)$",
        written=r"$(w_t\circ v)k^\top$",
        loss=r"$\tfrac12\lVert W\,\mathrm{Diag}(\sqrt{1-\alpha_t})\rVert^2$, "
        r"then $\tfrac12\lVert w_t\circ v - W(b_t\circ k)\rVert^2$",
        step_size="$1$, then $1/b_t$ per key channel",
        source="arXiv:2605.22791",
    )
    decay: ClassVar = "key"
    strength: ClassVar = ("key", "value")
    transition: ClassVar = "other"  # `part` has its own.

    chunk_size: Count = 16  # As GLA's.

    def write(self, state: State, token: Tokens) -> State:
        erase, add = self.strengths(token)
        state = jnp.exp(given(token.log_decay))[:, None] * state
        found = (erase * token.key) @ state
        return state + jnp.outer(token.key, add * token.value - found)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        erase, add = self.strengths(token)
        forget = forgotten(token.log_decay)[:, None]

        def error(matrix):
            return squared(add * token.value - (erase * token.key) @ matrix)

        decay = LocalLoss(lambda matrix: jnp.sum(forget * jnp.square(matrix)) / 2)
        # The gradient lies along b k; a step of 1 / b per channel lies along k.
        return decay, LocalLoss(error, 1 / erase[:, None])

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        erase, add = self.strengths(tokens)
        return self._chunked(tokens, erase, add * tokens.value, state, starts)

    def part(self, tokens: Tokens, starts: Starts = None) -> Mixing:
        erase, add = self.strengths(tokens)
        width = tokens.key.shape[-1]
        start, value = beside_identity(add * tokens.value, width)
        end = self._chunked(tokens, erase, value, start, starts).final_state
        return Mixing(end[..., :width], end[..., width:])

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        strength = jax.nn.sigmoid(given(inputs.strength))
        if self.negative_eigenvalues:  # Of b alone.
            erases = jnp.arange(strength.shape[-1]) < given(inputs.decay).shape[-1]
            strength = jnp.where(erases, 2.0, 1.0).astype(strength.dtype) * strength
        return projected_decay(inputs), strength

    def _chunked(
        self, tokens: Tokens, erase: Array, value: Array, state: State, starts: Starts
    ) -> RecurrenceOutput:
        # An erasure is read before the token's decay.
        found = jnp.exp(given(tokens.log_decay)) * erase * tokens.key
        erasure = Erasure(found, tokens.key)
        return self.recurrence(tokens._replace(value=value), state, starts, erasure=erasure)
