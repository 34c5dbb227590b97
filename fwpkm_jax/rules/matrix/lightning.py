"""Lightning attention: linear attention of SiLU features with a constant decay."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fwpkm_jax.rules.matrix.base import Form, GateInputs
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule


@dataclass(frozen=True, kw_only=True)
class LightningAttention(AbstractRecurrenceRule):
    """RetNet's rule with other rates: of H heads, head h = 1..H keeps `exp(-2^(-8h/H))`.

    The published layers also put SiLU on values, as this one does, and lower the rates from layer
    to layer, which this one leaves out.

    References: Qin et al. 2024, arXiv:2401.04658; MiniMax 2025, arXiv:2501.08313.
    """

    form: ClassVar[Form] = Form(
        name="lightning attention",
        right=r"$\lambda_h I$, $\lambda_h = e^{-2^{-8h/H}}$",
        written=r"$vk^\top$",
        loss=r"$-v^\top Wk + \tfrac{1-\lambda_h}{2}\lVert W\rVert^2$",
        source="arXiv:2401.04658",
    )
    decay: ClassVar = "head"
    value_map: ClassVar = "silu"

    feature_map: FeatureMap = "silu"

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        heads = inputs.shape[2]
        # As ALiBi's slopes: half-lives from a token to 180 tokens over the heads.
        rates = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
        log_decay = jnp.asarray(-rates, jnp.float32)[None, None]
        return jnp.broadcast_to(log_decay, inputs.shape), None
