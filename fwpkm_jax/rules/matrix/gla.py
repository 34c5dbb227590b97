"""Gated linear attention: one decay per key channel."""

from dataclasses import dataclass
from typing import ClassVar

import jax
from jaxtyping import Array

from fwpkm_jax.core.recurrence.decay_starts import sigmoid_bias
from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import Form, GateInputs, LearnedGates, given
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule

_TEMPERATURE = 16  # The published root of the sigmoid.


@dataclass(frozen=True, kw_only=True)
class GLA(AbstractRecurrenceRule):
    """Linear attention with a decay per token, head and key channel.

    References: Yang et al. 2024, arXiv:2312.06635.
    """

    form: ClassVar[Form] = Form(
        name="GLA",
        right=r"$\mathrm{Diag}(\alpha_t)$",
        written=r"$vk^\top$",
        loss=r"$-v^\top Wk + \tfrac12\lVert W\,\mathrm{Diag}(\sqrt{1-\alpha_t})\rVert^2$",
        source="arXiv:2312.06635",
    )
    decay: ClassVar = "key"
    # The gate is sigmoid(x)^(1 / temperature), so that decays begin near 1.
    learned_gates: ClassVar = LearnedGates(
        decay=True, decay_of_step=lambda step: sigmoid_bias(_TEMPERATURE * step)
    )

    chunk_size: Count = 16  # Decays per channel cost more in longer chunks, on a CPU.

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        # Divided, so that a projection of 0 still keeps most of the memory.
        return jax.nn.log_sigmoid(given(inputs.decay)) / _TEMPERATURE, None
