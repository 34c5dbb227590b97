"""DeltaProduct: several delta steps per token."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import (
    Form,
    GateInputs,
    LearnedGates,
    LocalLoss,
    State,
    Tokens,
    given,
)
from fwpkm_jax.rules.matrix.deltanet import sigmoid_strength
from fwpkm_jax.rules.matrix.gated_deltanet import (
    SOFTPLUS_GATES,
    AbstractGatedDelta,
    projected_decay,
)
from fwpkm_jax.rules.matrix.recurrence import delta_step, error_loss, gated_error_loss


@dataclass(frozen=True, kw_only=True)
class DeltaProduct(AbstractGatedDelta):
    """A decay per token, then `num_steps` delta steps, each with its own key, value and strength.

    References: Siems et al. 2025, arXiv:2502.10297.
    """

    form: ClassVar[Form] = Form(
        name="DeltaProduct",
        right=r"$\alpha_t\prod_j(I - \beta_j k_jk_j^\top)$",
        written=r"$\sum_j \beta_j v_jk_j^\top \prod_{i>j}(I - \beta_i k_ik_i^\top)$",
        loss=r"Gated DeltaNet's, then $\tfrac12\lVert v_j - Wk_j\rVert^2$ for $j > 1$",
        step_size=r"$1$, then $\beta_j$",
        source="arXiv:2502.10297",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    delta: ClassVar = True

    negative_eigenvalues: bool = True
    """Lets β reach 2 instead of 1, as published: products of reflections are rotations."""
    num_steps: Count = 2
    """Delta steps per token."""
    gated: bool = False
    """Whether a layer learns a decay. Off: the memory does not decay."""

    @classmethod
    def variants(cls) -> "tuple[DeltaProduct, ...]":
        return (cls(num_steps=3, gated=True),)

    @property
    def steps(self) -> int:
        return self.num_steps

    def write(self, state: State, token: Tokens) -> State:
        state = jnp.exp(given(token.log_decay)) * state
        # The decay comes once per token, before its first step.
        for key, value, strength in self._each(token):
            state = delta_step(state, key, value, strength)
        return state

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        # The first loss has the decay in it; the others are plain errors.
        first, *others = self._each(token)
        first_loss = gated_error_loss(token.log_decay, *first)
        return (first_loss, *(error_loss(*other) for other in others))

    @property
    def learned_gates(self) -> LearnedGates:  # pyright: ignore[reportIncompatibleVariableOverride]
        return SOFTPLUS_GATES if self.gated else LearnedGates(strength=True)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        strength = sigmoid_strength(inputs, self.negative_eigenvalues)
        if not self.gated:
            return jnp.zeros(inputs.shape, strength.dtype), strength
        return projected_decay(inputs), strength

    def _each(self, token: Tokens) -> list[tuple[Array, Array, Array]]:
        if self.num_steps == 1:
            return [(token.key, token.value, given(token.strength))]
        return list(zip(token.key, token.value, given(token.strength), strict=True))
