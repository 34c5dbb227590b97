"""Gated DeltaNet: a decay, then a delta step."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.core.recurrence.chunk_decay import softplus_decay
from fwpkm_jax.core.recurrence.decay_starts import softplus_bias
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
    forgotten,
    given,
    squared,
)
from fwpkm_jax.rules.matrix.deltanet import delta_step, sigmoid_strength
from fwpkm_jax.rules.matrix.features import FeatureMap
from pallas_kernels.gated_delta import chunk_gated_delta_rule

SOFTPLUS_GATES = LearnedGates(
    decay=True,
    strength=True,
    log_rate=True,
    decay_bias=1.0,
    decay_of_step=softplus_bias,
)
"""What `projected_decay` and a strength of their own need, for all rules that have both."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(AbstractMatrixRule):
    """A decay per token and head, then a delta step of `strength` (β).

    Runs the kernels of `pallas_kernels.gated_delta` where the device has them.

    References: Yang et al. 2024, arXiv:2412.06464.
    """

    form: ClassVar[Form] = Form(
        name="Gated DeltaNet",
        left="$I$",
        right=r"$\alpha_t(I - \beta_t kk^\top)$",
        written=r"$\beta_t vk^\top$",
        read="$Wq$",
        loss=r"$\tfrac{\beta_t}{2\alpha_t}\lVert v - \alpha_t Wk\rVert^2 "
        r"+ \tfrac{1-\alpha_t}{2}\lVert W\rVert^2$",
        step_size="$1$",
        source="arXiv:2412.06464",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    transition: ClassVar = "mixes_keys"
    learned_gates: ClassVar = SOFTPLUS_GATES

    feature_map: FeatureMap = "l2"
    convolution: bool = True
    negative_eigenvalues: bool = False
    """Lets β reach 2 instead of 1."""

    def write(self, state: State, token: Tokens) -> State:
        state = jnp.exp(given(token.log_decay)) * state
        return delta_step(state, token.key, token.value, given(token.strength))

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        return (gated_error_loss(token, token.key, token.value, given(token.strength)),)

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        # By the kernels where they run; `features` has scaled the queries already.
        out = chunk_gated_delta_rule(
            tokens.query,
            tokens.key,
            tokens.value,
            log_decay=given(tokens.log_decay),
            beta=given(tokens.strength),
            initial_state=state,
            starts=starts,
            scale=1.0,
            chunk_size=self.chunk_size,
        )
        return RecurrenceOutput(*out)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return projected_decay(inputs), sigmoid_strength(inputs, self.negative_eigenvalues)


def projected_decay(inputs: GateInputs) -> Array:
    """`-rate * softplus(projection)`, the logarithm of the share kept."""
    return softplus_decay(given(inputs.log_rate)[None, None], given(inputs.decay))


def gated_error_loss(token: Tokens, key: Array, value: Array, strength: Array) -> LocalLoss:
    """One loss for a decay and the delta step after it, at the memory before both."""
    share = jnp.exp(given(token.log_decay))

    def loss(matrix):
        # Of gradient -β (v - α W k) k^T + (1 - α) W: a step of 1 decays and corrects at once.
        error = squared(value - share * (key @ matrix))
        return strength / share * error + forgotten(token.log_decay) * squared(matrix)

    return LocalLoss(loss)
