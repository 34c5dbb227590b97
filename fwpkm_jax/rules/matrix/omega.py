"""Omega, the rule of Atlas: each token writes the errors of the last tokens again."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

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
from fwpkm_jax.rules.matrix.windows import WindowState


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

    def init(
        self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike
    ) -> WindowState:
        return WindowState.empty(super().init(batch, heads, key, value, dtype=dtype), self.window)

    def write(self, state: WindowState, token: Tokens) -> WindowState:
        kept = jnp.exp(given(token.log_decay)) * state.matrix
        keys, values, strengths = state.window(token, given(token.strength))
        # All at the memory before the token, so that one product gives them.
        errors = strengths[:, None] * (values - keys @ state.matrix)
        written = WindowState(
            kept + keys.T @ errors / self.window, keys[1:], values[1:], strengths[1:]
        )
        left = state._replace(matrix=kept)
        real = given(token.strength) != 0
        return WindowState(*(jnp.where(real, x, y) for x, y in zip(written, left, strict=True)))

    def losses(self, state: WindowState, token: Tokens) -> tuple[LocalLoss, ...]:
        keys, values, strengths = state.window(token, given(token.strength))
        forget = forgotten(token.log_decay)

        def loss(matrix):
            errors = jnp.sqrt(strengths)[:, None] * (values - keys @ matrix)
            return squared(errors) / self.window + forget * squared(matrix)

        return (LocalLoss(loss),)

    def chunked(
        self, tokens: Tokens, state: WindowState, starts: Starts = None
    ) -> RecurrenceOutput:
        return self.recurrent(tokens, state, starts)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return projected_decay(inputs), sigmoid_strength(inputs, False)
