"""DeltaNet: each write corrects the value that the memory returns for its key."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LearnedGates,
    LocalLoss,
    State,
    Tokens,
    given,
    squared,
)
from fwpkm_jax.rules.matrix.features import FeatureMap


@dataclass(frozen=True, kw_only=True)
class DeltaNet(AbstractMatrixRule):
    """Moves the value that the key reads towards the token's value by `strength` (β) of the error.

    References: Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484; Grazzi et
    al. 2024, arXiv:2411.12537 (β above 1).
    """

    form: ClassVar[Form] = Form(
        name="DeltaNet",
        left="$I$",
        right=r"$I - \beta_t kk^\top$",
        written=r"$\beta_t vk^\top$",
        read="$Wq$",
        loss=r"$\tfrac12\lVert v - Wk\rVert^2$",
        step_size=r"$\beta_t$",
        source="arXiv:2102.11174",
    )
    strength: ClassVar = True
    delta: ClassVar = True
    learned_gates: ClassVar = LearnedGates(strength=True)

    feature_map: FeatureMap = "l2"
    convolution: bool = True
    negative_eigenvalues: bool = False
    """Lets β reach 2 instead of 1; a write may then reverse the memory's sign along its key."""

    @classmethod
    def variants(cls) -> "tuple[DeltaNet, ...]":
        return (cls(negative_eigenvalues=True),)

    def write(self, state: State, token: Tokens) -> State:
        return delta_step(state, token.key, token.value, given(token.strength))

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        return (error_loss(token.key, token.value, given(token.strength)),)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return None, sigmoid_strength(inputs, self.negative_eigenvalues)


def delta_step(state: Array, key: Array, value: Array, strength: Array) -> Array:
    """`W + β (v - W k) k^T`, of the transposed W that is the state."""
    return state + strength * jnp.outer(key, value - key @ state)


def error_loss(key: Array, value: Array, strength: Array) -> LocalLoss:
    """The loss whose gradient step is `delta_step`."""
    return LocalLoss(lambda matrix: squared(value - key @ matrix), strength)


def sigmoid_strength(inputs: GateInputs, negative_eigenvalues: bool) -> Array:
    """β between 0 and 1, or 2."""
    # Above 1 a step overshoots: the eigenvalue along the key, 1 - β, is then negative.
    return jax.nn.sigmoid(given(inputs.strength)) * (2 if negative_eigenvalues else 1)
