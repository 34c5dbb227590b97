"""RetNet's retention: linear attention with a constant decay."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fwpkm_jax.rules.matrix.base import Form, GateInputs
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule


@dataclass(frozen=True, kw_only=True)
class RetNet(AbstractRecurrenceRule):
    """Decays by the same share at every token; heads differ in their shares.

    The rule alone: the published layer also turns queries and keys by position.

    References: Sun et al. 2023, arXiv:2307.08621.
    """

    form: ClassVar[Form] = Form(
        name="RetNet",
        right=r"$\lambda I$, constant per head",
        written=r"$vk^\top$",
        loss=r"$-v^\top Wk + \tfrac{1-\lambda}{2}\lVert W\rVert^2$",
        source="arXiv:2307.08621",
    )
    decay: ClassVar = "head"

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        # Heads keep 31/32, 63/64, ..., as published.
        share = 1 - 2.0 ** (-5 - np.arange(inputs.shape[2]))
        log_decay = jnp.asarray(np.log(share), jnp.float32)[None, None]
        return jnp.broadcast_to(log_decay, inputs.shape), None
