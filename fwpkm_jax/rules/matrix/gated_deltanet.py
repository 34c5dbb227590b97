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
    Starts,
    State,
    Tokens,
    given,
)
from fwpkm_jax.rules.matrix.deltanet import sigmoid_strength
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule
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
class AbstractGatedDelta(AbstractMatrixRule):
    """What rules around Gated DeltaNet share: gates, and unit keys behind a convolution."""

    learned_gates: ClassVar[LearnedGates] = SOFTPLUS_GATES

    feature_map: FeatureMap = "l2"
    convolution: bool = True
    negative_eigenvalues: bool = False
    """Lets β reach 2 instead of 1."""

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return projected_decay(inputs), sigmoid_strength(inputs, self.negative_eigenvalues)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(AbstractGatedDelta, AbstractRecurrenceRule):
    """A decay per token and head, then a delta step of `strength` (β).

    Runs the kernels of `pallas_kernels.gated_delta` where the device has them.

    References: Yang et al. 2024, arXiv:2412.06464.
    """

    form: ClassVar[Form] = Form(
        name="Gated DeltaNet",
        right=r"$\alpha_t(I - \beta_t kk^\top)$",
        written=r"$\beta_t vk^\top$",
        loss=r"$\tfrac{\beta_t}{2\alpha_t}\lVert v - \alpha_t Wk\rVert^2 "
        r"+ \tfrac{1-\alpha_t}{2}\lVert W\rVert^2$",
        source="arXiv:2412.06464",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    delta: ClassVar = True
    transition: ClassVar = "mixes_keys"

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


def projected_decay(inputs: GateInputs) -> Array:
    """`-rate * softplus(projection)`, the logarithm of the share kept, by head or key channel."""
    decay = given(inputs.decay)
    rate = jnp.expand_dims(given(inputs.log_rate), (0, 1, *range(3, decay.ndim)))
    return softplus_decay(rate, decay)
