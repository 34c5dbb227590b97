"""Gated random-feature attention: a running mean of the written values."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
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
    squared,
)
from fwpkm_jax.rules.matrix.features import POSITIVE, FeatureMap
from fwpkm_jax.rules.matrix.normalizer import divided, with_one


@dataclass(frozen=True, kw_only=True)
class GatedRFA(AbstractMatrixRule):
    """Keeps a share λ and writes with 1 - λ; reads are normalised by the sum of their weights.

    References: Peng et al. 2021, arXiv:2103.02143.
    """

    form: ClassVar[Form] = Form(
        name="Gated RFA",
        right=r"$\lambda_t I$",
        written=r"$(1-\lambda_t) vk^\top$",
        read=r"$Wq / (z^\top q)$, $z$ as $W$ with $v = 1$",
        loss=r"$-v^\top Wk + \tfrac12\lVert W\rVert^2$",
        step_size=r"$1-\lambda_t$",
        source="arXiv:2103.02143",
    )
    decay: ClassVar = "head"
    learned_gates: ClassVar = LearnedGates(decay=True, decay_bias=3.0, decay_of_step=sigmoid_bias)

    feature_map: FeatureMap = "random"

    def __post_init__(self):
        super().__post_init__()
        if self.feature_map not in POSITIVE:
            raise ValueError(
                f"feature_map={self.feature_map!r} would divide by sums of either sign; choose one "
                f"of {list(POSITIVE)}."
            )

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike) -> State:
        # The last column sums the keys, by which reads are divided.
        return jnp.zeros((batch, heads, key, value + 1), dtype)

    def write(self, state: State, token: Tokens) -> State:
        written = forgotten(token.log_decay) * jnp.outer(token.key, with_one(token.value))
        return jnp.exp(given(token.log_decay)) * state + written

    def read_out(self, product: Array) -> Array:
        return divided(product)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        value = with_one(token.value)
        return (
            LocalLoss(
                lambda m: squared(m) - agreement(m, token, value), forgotten(token.log_decay)
            ),
        )

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        written = forgotten(tokens.log_decay)[..., None] * with_one(tokens.value)
        return tokens._replace(value=written)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return jax.nn.log_sigmoid(given(inputs.decay)), None
