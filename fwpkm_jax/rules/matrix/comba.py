"""Comba: a delta step that erases less than it adds, with a correction of the query."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array

from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.literals import NotNegative
from fwpkm_jax.rules.matrix.base import Form, GateInputs, Tokens, given
from fwpkm_jax.rules.matrix.deltanet import sigmoid_strength
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.gated_deltanet import SOFTPLUS_GATES, projected_decay
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule


@dataclass(frozen=True, kw_only=True)
class Comba(AbstractRecurrenceRule):
    """Gated DeltaNet that erases `feedback` (b) of what its key reads, and reads with q - d b k.

    Erasing with strength bβ and adding with strength β is one delta step of strength bβ towards
    v / b. The query's correction is part of `features`, before the norm and the scale, where
    the authors' layer in flash-linear-attention has it: the unit vector of q - d b k reads. That
    layer learns b and the `correction` d for each head; here they are settings. Its kernels also
    norm b k, so that b changes only what it reads; here b weakens the erasure, as in the paper.

    References: Hu et al. 2025, arXiv:2506.02475; flash-linear-attention, `layers/comba.py`.
    """

    form: ClassVar[Form] = Form(
        name="Comba",
        right=r"$\alpha_t(I - b\beta_t kk^\top)$",
        written=r"$\beta_t vk^\top$",
        read=r"$Wq$, $q\propto q - dbk$",
        loss=r"$\tfrac{b\beta_t}{2\alpha_t}\lVert v/b - \alpha_t Wk\rVert^2 "
        r"+ \tfrac{1-\alpha_t}{2}\lVert W\rVert^2$",
        source="arXiv:2506.02475",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    delta: ClassVar = True
    learned_gates: ClassVar = SOFTPLUS_GATES

    feature_map: FeatureMap = "l2"
    convolution: bool = True
    feedback: float = 0.73
    """b, at least 0.001: erased share of the write strength. The default is the published start."""
    correction: NotNegative = 1.0
    """d: `d * feedback` of a token's key is subtracted from its query before both are normed. The
    authors found 0.02 better in some small models."""

    def __post_init__(self):
        super().__post_init__()
        if not self.feedback >= 1e-3:
            raise ValueError(
                f"feedback={self.feedback} must be at least 0.001; without any, use the rule "
                "'mamba2'."
            )

    def features(self, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        dtype = compute_dtype(query.dtype)
        # The output correction of the paper, before the norm as in the authors' layer.
        query = query.astype(dtype) - self.correction * self.feedback * key.astype(dtype)
        return super().features(query, key, value)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return projected_decay(inputs), sigmoid_strength(inputs, False)

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        # b β (v / b - W k) = β v - b β W k: erases with b β, adds with β.
        value = tokens.value / self.feedback
        return tokens._replace(value=value, strength=self.feedback * given(tokens.strength))
