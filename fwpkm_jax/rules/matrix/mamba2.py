"""Mamba-2's state-space dual: a step size per token that both writes and forgets."""

from dataclasses import dataclass
from typing import ClassVar

import jax
from jaxtyping import Array

from fwpkm_jax.core.recurrence.chunk_decay import softplus_decay
from fwpkm_jax.core.recurrence.decay_starts import softplus_bias
from fwpkm_jax.rules.matrix.base import Form, GateInputs, LearnedGates, Tokens, given
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule


@dataclass(frozen=True, kw_only=True)
class Mamba2(AbstractRecurrenceRule):
    """Decays by a share per token and head; `strength` (the step size Δ) scales what is written.

    The rule alone: the published block also adds its input to what is read.

    References: Dao and Gu 2024, arXiv:2405.21060.
    """

    form: ClassVar[Form] = Form(
        name="Mamba-2",
        right=r"$\lambda_t I$",
        written=r"$\Delta_t vk^\top$",
        loss=r"$-\Delta_t v^\top Wk + \tfrac{1-\lambda_t}{2}\lVert W\rVert^2$",
        source="arXiv:2405.21060",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    # softplus(-4) = 0.018, amid the published range of time steps.
    learned_gates: ClassVar = LearnedGates(
        strength=True, log_rate=True, strength_bias=-4.0, strength_of_step=softplus_bias
    )

    convolution: bool = True

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        return tokens._replace(value=given(tokens.strength)[..., None] * tokens.value)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        # One projection, the step size, says how much is kept and how much is written.
        step = given(inputs.strength)
        log_decay = softplus_decay(given(inputs.log_rate)[None, None], step)
        return log_decay, jax.nn.softplus(step)
