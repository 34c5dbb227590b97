"""Omega, the rule of Atlas: each token writes the errors of the last tokens again."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LocalLoss,
    Starts,
    Tokens,
    forgotten,
    given,
    squared,
)
from fwpkm_jax.rules.matrix.deltanet import sigmoid_strength
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.gated_deltanet import SOFTPLUS_GATES, projected_decay


class OmegaState(NamedTuple):
    """The memory, and the last tokens, which the next one writes again, oldest first."""

    matrix: Float[Array, "*dims key value"]
    keys: Float[Array, "*dims before key"]
    values: Float[Array, "*dims before value"]
    strengths: Float[Array, "*dims before"]


@dataclass(frozen=True, kw_only=True)
class Omega(AbstractMatrixRule):
    """A decay, and one step on the mean error of the last `window` tokens, by `strength` (β) each.

    All errors of a token are taken at the memory before it. The shared algorithm takes errors after
    a token's decay, which may leave nothing of that memory, so that it cannot compute this rule:
    `run` goes token by token, as `recurrent`, and is slow for long sequences. The publication adds
    polynomial features, momentum and orthogonal steps; this is its window alone, for a matrix. A
    token of strength 0 does not enter the window.

    References: Behrouz et al. 2025, arXiv:2505.23735.
    """

    form: ClassVar[Form] = Form(
        name="Omega (Atlas)",
        right=r"$\alpha_t I - \tfrac1c\sum_{i>t-c} \beta_i k_ik_i^\top$",
        written=r"$\tfrac1c\sum_{i>t-c} \beta_i v_ik_i^\top$",
        loss=r"$\tfrac1{2c}\sum_{i>t-c}\beta_i\lVert v_i - Wk_i\rVert^2 "
        r"+ \tfrac{1-\alpha_t}{2}\lVert W\rVert^2$",
        source="arXiv:2505.23735",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    learned_gates: ClassVar = SOFTPLUS_GATES

    feature_map: FeatureMap = "l2"
    convolution: bool = True
    window: Count = 4
    """c: tokens whose errors each token writes, itself included."""

    @classmethod
    def variants(cls) -> "tuple[Omega, ...]":
        return (cls(window=3),)

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike) -> OmegaState:
        before = (batch, heads, self.window - 1)
        return OmegaState(
            matrix=jnp.zeros((batch, heads, key, value), dtype),
            keys=jnp.zeros((*before, key), dtype),
            values=jnp.zeros((*before, value), dtype),
            strengths=jnp.zeros(before, dtype),
        )

    def write(self, state: OmegaState, token: Tokens) -> OmegaState:
        kept = jnp.exp(given(token.log_decay)) * state.matrix
        keys, values, strengths = self._window(state, token)
        # All at the memory before the token, so that one product gives them.
        errors = strengths[:, None] * (values - keys @ state.matrix)
        written = OmegaState(
            kept + keys.T @ errors / self.window, keys[1:], values[1:], strengths[1:]
        )
        left = state._replace(matrix=kept)
        real = given(token.strength) != 0
        return OmegaState(*(jnp.where(real, x, y) for x, y in zip(written, left, strict=True)))

    def matrix(self, state: OmegaState) -> Float[Array, "key value"]:
        return state.matrix

    def losses(self, state: OmegaState, token: Tokens) -> tuple[LocalLoss, ...]:
        keys, values, strengths = self._window(state, token)
        forget = forgotten(token.log_decay)

        def loss(matrix):
            errors = jnp.sqrt(strengths)[:, None] * (values - keys @ matrix)
            return squared(errors) / self.window + forget * squared(matrix)

        return (LocalLoss(loss),)

    def chunked(self, tokens: Tokens, state: OmegaState, starts: Starts = None) -> RecurrenceOutput:
        return self.recurrent(tokens, state, starts)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return projected_decay(inputs), sigmoid_strength(inputs, False)

    def _window(self, state: OmegaState, token: Tokens) -> tuple[Array, Array, Array]:
        """Keys, values and strengths of one head's last tokens, its newest the last."""
        strength = given(token.strength)
        return (
            jnp.concatenate([state.keys, token.key[None]]),
            jnp.concatenate([state.values, token.value[None]]),
            jnp.concatenate([state.strengths, strength[None]]),
        )
