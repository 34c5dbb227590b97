"""HGRN2: each key channel writes the share that it forgets."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.core.recurrence.decay_starts import sigmoid_bias
from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    LearnedGates,
    LocalLoss,
    State,
    Tokens,
    squared,
)
from fwpkm_jax.rules.matrix.features import FEATURE_MAPS, FeatureMap


@dataclass(frozen=True, kw_only=True)
class HGRN2(AbstractMatrixRule):
    """Moves the content of each key channel towards the value by the share `key` in [0, 1].

    GLA whose keys are 1 minus its decays. The published layer bounds the shares from above by a
    learned number per layer, which this one leaves out; its channels start at time steps instead.

    References: Qin et al. 2024, arXiv:2404.07904.
    """

    form: ClassVar[Form] = Form(
        name="HGRN2",
        right=r"$\mathrm{Diag}(1 - k)$",
        written=r"$vk^\top$",
        loss=r"$\tfrac12\sum_i k_i\lVert v - We_i\rVert^2$, $e_i$ the $i$-th unit vector",
        source="arXiv:2404.07904",
    )
    learned_gates: ClassVar = LearnedGates(key_of_step=lambda step: -sigmoid_bias(step))

    feature_map: FeatureMap = "sigmoid"
    chunk_size: Count = 16  # As GLA's.

    def __post_init__(self):
        super().__post_init__()
        if self.feature_map != "sigmoid":
            raise ValueError(
                f"feature_map={self.feature_map!r} makes keys that are no shares between 0 and 1; "
                "leave it at 'sigmoid'."
            )

    def write(self, state: State, token: Tokens) -> State:
        # One gate for both: a key channel writes the share k of the value, and keeps 1 - k.
        return state + token.key[:, None] * (token.value[None] - state)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        # Half the weighed square: its gradient is k_i (W e_i - v).
        root = jnp.sqrt(token.key)[:, None]
        return (LocalLoss(lambda matrix: squared(root * (token.value[None] - matrix))),)

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        # A share that rounds to 1 would have an infinite logarithm; its gradient would be NaN.
        most = 1 - jnp.finfo(tokens.key.dtype).eps / 2
        return tokens._replace(log_decay=jnp.log1p(-jnp.minimum(tokens.key, most)))

    def features(self, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        _, key, value = super().features(query, key, value)
        return FEATURE_MAPS["silu"](query) * query.shape[-1] ** -0.5, key, value
