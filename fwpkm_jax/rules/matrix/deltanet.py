"""DeltaNet: each write corrects the value that the memory returns for its key."""

from dataclasses import dataclass
from typing import ClassVar

import jax
from jaxtyping import Array

from fwpkm_jax.rules.matrix.base import Form, GateInputs, LearnedGates, given
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule


@dataclass(frozen=True, kw_only=True)
class DeltaNet(AbstractRecurrenceRule):
    """Moves the value that the key reads towards the token's value by `strength` (β) of the error.

    References: Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484; Grazzi et
    al. 2024, arXiv:2411.12537 (β above 1).
    """

    form: ClassVar[Form] = Form(
        name="DeltaNet",
        right=r"$I - \beta_t kk^\top$",
        written=r"$\beta_t vk^\top$",
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

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return None, sigmoid_strength(inputs, self.negative_eigenvalues)


def sigmoid_strength(inputs: GateInputs, negative_eigenvalues: bool) -> Array:
    """β between 0 and 1, or 2."""
    # Above 1 a step overshoots: the eigenvalue along the key, 1 - β, is then negative.
    return jax.nn.sigmoid(given(inputs.strength)) * (2 if negative_eigenvalues else 1)
