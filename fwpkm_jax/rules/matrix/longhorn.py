"""Longhorn: an implicit gradient step."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.rules.matrix.base import Form, GateInputs, LearnedGates, Tokens, given
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule


@dataclass(frozen=True, kw_only=True)
class Longhorn(AbstractRecurrenceRule):
    """Minimises |W - W_{t-1}|^2 + β |v - W k|^2 over W, with `strength` β > 0.

    An implicit step: the explicit one whose size β / (1 + β |k|^2) cannot overshoot, so that keys
    need no unit length. The published rule has a β per value channel and, in chunks, replaces
    k k^T by its diagonal; this one has a β per head and is exact.

    References: Liu et al. 2024, arXiv:2407.14207.
    """

    form: ClassVar[Form] = Form(
        name="Longhorn",
        right=r"$I - \epsilon_t kk^\top$, $\epsilon_t = \beta_t / (1 + \beta_t k^\top k)$",
        written=r"$\epsilon_t vk^\top$",
        loss=r"$\tfrac12\lVert v - Wk\rVert^2$",
        step_size=r"$\epsilon_t$",
        source="arXiv:2407.14207",
    )
    strength: ClassVar = True
    delta: ClassVar = True
    learned_gates: ClassVar = LearnedGates(strength=True)

    convolution: bool = True

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return None, jax.nn.sigmoid(given(inputs.strength))

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        # By Sherman and Morrison: (I + β k k^T)^-1 = I - β k k^T / (1 + β |k|^2).
        strength = given(tokens.strength)
        explicit = strength / (1 + strength * jnp.sum(jnp.square(tokens.key), axis=-1))
        return tokens._replace(strength=explicit)
