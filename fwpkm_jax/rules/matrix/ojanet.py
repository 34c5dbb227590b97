"""OjaNet: Oja's rule, a delta step with keys and values exchanged."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.core.numerics import l2_normalize
from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LearnedGates,
    LocalLoss,
    Starts,
    State,
    Tokens,
    agreement,
    given,
    squared,
)
from fwpkm_jax.rules.matrix.deltanet import sigmoid_strength
from fwpkm_jax.rules.matrix.features import FeatureMap


@dataclass(frozen=True, kw_only=True)
class OjaNet(AbstractMatrixRule):
    """Oja's rule: a Hebbian write of weight `strength` (β) minus what the value already recalls.

    The delta rule with keys and values exchanged; in a layer values are at unit length for the
    reason that DeltaNet's keys are.

    References: Irie et al. 2022, arXiv:2210.06184.
    """

    form: ClassVar[Form] = Form(
        name="OjaNet",
        left=r"$I - \beta_t vv^\top$",
        right="$I$",
        written=r"$\beta_t vk^\top$",
        loss=r"$-v^\top Wk + \tfrac12\lVert W^\top v\rVert^2$",
        step_size=r"$\beta_t$",
        source="arXiv:2210.06184",
    )
    strength: ClassVar = True
    transition: ClassVar = "mixes_values"
    learned_gates: ClassVar = LearnedGates(strength=True)

    feature_map: FeatureMap = "l2"
    convolution: bool = True
    negative_eigenvalues: bool = False
    """Lets β reach 2 instead of 1."""

    def write(self, state: State, token: Tokens) -> State:
        # The delta rule's error with both exchanged: k - W^T v in place of v - W k.
        error = token.key - state @ token.value
        return state + given(token.strength) * jnp.outer(error, token.value)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state

        def loss(matrix):
            return squared(matrix @ token.value) - agreement(matrix, token)

        return (LocalLoss(loss, given(token.strength)),)

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        exchanged = tokens._replace(key=tokens.value, value=tokens.key)
        out = self.recurrence(
            exchanged, state.swapaxes(-1, -2), starts, beta=tokens.strength, read="value"
        )
        return out._replace(final_state=out.final_state.swapaxes(-1, -2))

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return None, sigmoid_strength(inputs, self.negative_eigenvalues)

    def features(self, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        query, key, value = super().features(query, key, value)
        return query, key, l2_normalize(value)
