"""Kimi Delta Attention: one decay per key channel, then a delta step."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.core.recurrence.chunk_decay import softplus_decay
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LocalLoss,
    State,
    Tokens,
    forgotten,
    given,
)
from fwpkm_jax.rules.matrix.deltanet import delta_step, error_loss, sigmoid_strength
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.gated_deltanet import SOFTPLUS_GATES


@dataclass(frozen=True, kw_only=True)
class KDA(AbstractMatrixRule):
    """A decay per token, head and key channel, then a delta step of `strength` (β).

    Gated DeltaNet with GLA's decay. Its transition is not symmetric, so that no single loss has it
    as its gradient step: the decay and the delta step are one step each.

    References: Kimi Team 2025, arXiv:2510.26692.
    """

    form: ClassVar[Form] = Form(
        name="KDA",
        left="$I$",
        right=r"$\mathrm{Diag}(\alpha_t)(I - \beta_t kk^\top)$",
        written=r"$\beta_t vk^\top$",
        read="$Wq$",
        loss=r"$\tfrac12\lVert W\,\mathrm{Diag}(\sqrt{1-\alpha_t})\rVert^2$, "
        r"then $\tfrac12\lVert v - Wk\rVert^2$",
        step_size=r"$1$, then $\beta_t$",
        source="arXiv:2510.26692",
    )
    decay: ClassVar = "key"
    strength: ClassVar = True
    delta: ClassVar = True
    learned_gates: ClassVar = SOFTPLUS_GATES

    feature_map: FeatureMap = "l2"
    convolution: bool = True
    chunk_size: int = 16  # As GLA's.
    negative_eigenvalues: bool = False
    """Lets β reach 2 instead of 1."""

    def write(self, state: State, token: Tokens) -> State:
        # The decay acts on the key channels, so it does not commute with the delta step.
        state = jnp.exp(given(token.log_decay))[:, None] * state
        return delta_step(state, token.key, token.value, given(token.strength))

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        error = error_loss(token.key, token.value, given(token.strength))
        return (decay_loss(given(token.log_decay)), error)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        log_decay = softplus_decay(given(inputs.log_rate)[None, None, :, None], given(inputs.decay))
        return log_decay, sigmoid_strength(inputs, self.negative_eigenvalues)


def decay_loss(log_decay: Array) -> LocalLoss:
    """The loss whose gradient step is a decay per key channel, `[key]`."""
    forget = forgotten(log_decay)[:, None]
    return LocalLoss(lambda matrix: jnp.sum(forget * jnp.square(matrix)) / 2)
