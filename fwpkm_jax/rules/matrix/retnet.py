"""RetNet's retention: linear attention with a constant decay."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LocalLoss,
    State,
    Tokens,
    agreement,
    forgotten,
    given,
    squared,
)


@dataclass(frozen=True, kw_only=True)
class RetNet(AbstractMatrixRule):
    """Decays by the same share at every token; heads differ in their shares.

    The rule alone: the published layer also turns queries and keys by position.

    References: Sun et al. 2023, arXiv:2307.08621.
    """

    form: ClassVar[Form] = Form(
        name="RetNet",
        left="$I$",
        right=r"$\lambda I$, constant per head",
        written=r"$vk^\top$",
        read="$Wq$",
        loss=r"$-v^\top Wk + \tfrac{1-\lambda}{2}\lVert W\rVert^2$",
        step_size="$1$",
        source="arXiv:2307.08621",
    )
    decay: ClassVar = "head"

    def write(self, state: State, token: Tokens) -> State:
        return fading_sum(state, token)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        return (fading_sum_loss(token),)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        # Heads keep 31/32, 63/64, ..., as published.
        share = 1 - 2.0 ** (-5 - np.arange(inputs.shape[2]))
        log_decay = jnp.asarray(np.log(share), jnp.float32)[None, None]
        return jnp.broadcast_to(log_decay, inputs.shape), None


def fading_sum(state: State, token: Tokens) -> State:
    """A decay, then the value added under its key."""
    return jnp.exp(given(token.log_decay)) * state + jnp.outer(token.key, token.value)


def fading_sum_loss(token: Tokens) -> LocalLoss:
    """The loss whose gradient step is `fading_sum`."""
    forget = forgotten(token.log_decay)
    return LocalLoss(lambda matrix: forget * squared(matrix) - agreement(matrix, token))
