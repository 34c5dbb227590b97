"""Gated linear attention: one decay per key channel."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.core.recurrence.decay_starts import sigmoid_bias
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LearnedGates,
    LocalLoss,
    State,
    Tokens,
    agreement,
    forgotten,
    given,
)

_TEMPERATURE = 16  # The published root of the sigmoid.


@dataclass(frozen=True, kw_only=True)
class GLA(AbstractMatrixRule):
    """Linear attention with a decay per token, head and key channel.

    References: Yang et al. 2024, arXiv:2312.06635.
    """

    form: ClassVar[Form] = Form(
        name="GLA",
        left="$I$",
        right=r"$\mathrm{Diag}(\alpha_t)$",
        written=r"$vk^\top$",
        read="$Wq$",
        loss=r"$-v^\top Wk + \tfrac12\lVert W\,\mathrm{Diag}(\sqrt{1-\alpha_t})\rVert^2$",
        step_size="$1$",
        source="arXiv:2312.06635",
    )
    decay: ClassVar = "key"
    # The gate is sigmoid(x)^(1 / temperature), so that decays begin near 1.
    learned_gates: ClassVar = LearnedGates(
        decay=True, decay_of_step=lambda step: sigmoid_bias(_TEMPERATURE * step)
    )

    chunk_size: int = 16  # Decays per channel cost more in longer chunks, on a CPU.

    def write(self, state: State, token: Tokens) -> State:
        share = jnp.exp(given(token.log_decay))[:, None]
        return share * state + jnp.outer(token.key, token.value)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        forget = forgotten(token.log_decay)[:, None]

        def loss(matrix):
            return jnp.sum(forget * jnp.square(matrix)) / 2 - agreement(matrix, token)

        return (LocalLoss(loss),)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        # Divided, so that a projection of 0 still keeps most of the memory.
        return jax.nn.log_sigmoid(given(inputs.decay)) / _TEMPERATURE, None
