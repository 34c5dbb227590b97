"""Comba: a delta step that erases less than it adds, with a correction of the query."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

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
    given,
)
from fwpkm_jax.rules.matrix.deltanet import delta_step, sigmoid_strength
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.gated_deltanet import SOFTPLUS_GATES, gated_error_loss, softplus_decay


@dataclass(frozen=True, kw_only=True)
class Comba(AbstractMatrixRule):
    """Gated DeltaNet that erases `feedback` (b) of what its key reads, and reads with q - d k.

    Erasing with strength bβ and adding with strength β is one delta step of strength bβ towards
    v / b. The published layer learns b and the `correction` d for each head; here they
    are settings.

    References: Hu et al. 2025, arXiv:2506.02475.
    """

    form: ClassVar[Form] = Form(
        name="Comba",
        left="$I$",
        right=r"$\alpha_t(I - b\beta_t kk^\top)$",
        written=r"$\beta_t vk^\top$",
        read="$W(q - dk)$",
        loss=r"$\tfrac{b\beta_t}{2\alpha_t}\lVert v/b - \alpha_t Wk\rVert^2 "
        r"+ \tfrac{1-\alpha_t}{2}\lVert W\rVert^2$",
        step_size="$1$",
        source="arXiv:2506.02475",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    delta: ClassVar = True
    transition: ClassVar = "mixes_keys"

    feature_map: FeatureMap = "l2"
    convolution: bool = True
    feedback: float = 0.73
    """b, at least 0.001: erased share of the write strength. The default is the published start."""
    correction: float = 0.02
    """d: the share of a token's key that is subtracted from its query."""

    def __post_init__(self):
        super().__post_init__()
        if not self.feedback >= 1e-3:
            raise ValueError(
                f"feedback={self.feedback} must be at least 0.001; without any, use the rule "
                "'mamba2'."
            )
        if not self.correction >= 0:
            raise ValueError(f"correction={self.correction} must be at least 0; 0 leaves it out.")

    def write(self, state: State, token: Tokens) -> State:
        state = jnp.exp(given(token.log_decay)) * state
        return delta_step(state, *self._step(token))

    def read(self, state: State, token: Tokens):
        return (token.query - self.correction * token.key) @ state

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        return (gated_error_loss(token, *self._step(token)),)

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        _, value, strength = self._step(tokens)
        query = tokens.query - self.correction * tokens.key
        tokens = tokens._replace(query=query, value=value, strength=strength)
        return super().chunked(tokens, state, starts)

    @property
    def learned_gates(self) -> LearnedGates:
        return SOFTPLUS_GATES

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return softplus_decay(inputs), sigmoid_strength(inputs, False)

    def _step(self, tokens: Tokens) -> tuple[Array, Array, Array]:
        """Key, value and strength of the delta step that is the write."""
        return tokens.key, tokens.value / self.feedback, self.feedback * given(tokens.strength)
