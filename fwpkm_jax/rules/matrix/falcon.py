"""Falcon: a delta step normalised by the size of its key, with a ridge."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.literals import Bound
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LearnedGates,
    LocalLoss,
    State,
    Tokens,
    given,
    squared,
)
from fwpkm_jax.rules.matrix.deltanet import sigmoid_strength


@dataclass(frozen=True, kw_only=True)
class AbstractFalcon(AbstractMatrixRule):
    """What all Falcons share: the step η = β / (|k|^2 + λ), β in (0, 2), and the ridge.

    A write keeps 1 - ηλ of the memory. So that this stays positive, η is at most 1 / (2λ); the
    bound only affects keys shorter than sqrt(3λ). The publication writes a token under the features
    of the token before; in a layer the convolution before the keys can learn that.
    """

    learned_gates: ClassVar = LearnedGates(strength=True)

    convolution: bool = True
    ridge: Annotated[float, Bound(1e-06)] = 0.01
    """λ, at least 1e-6: weight of the memory's squared norm in the loss. Without it, a key of zeros
    would divide by 0."""

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return None, sigmoid_strength(inputs, True)

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        # The shared algorithm decays before it measures the error; step and value are adapted.
        step = self.step(tokens)
        # 1 - η λ, the share that the ridge leaves of every direction.
        kept = 1 - step * self.ridge
        return tokens._replace(
            value=(kept if self.strength == "value" else kept[..., None]) * tokens.value,
            log_decay=jnp.log(kept),
            strength=step / kept,
        )

    def step(self, tokens: Tokens) -> Array:
        """η."""
        size = jnp.sum(jnp.square(tokens.key), axis=-1, keepdims=self.strength == "value")
        return self.step_of(tokens, size)

    def step_of(self, tokens: Tokens, size: Array) -> Array:
        """η of keys whose squares have such a size."""
        # At most 1 / (2 λ): the ridge then leaves at least half of every direction.
        return jnp.minimum(given(tokens.strength) / (size + self.ridge), 0.5 / self.ridge)


@dataclass(frozen=True, kw_only=True)
class Falcon(AbstractFalcon):
    """Falcon-1: one gradient step η on an error and a ridge, normalised by the size of the key.

    Along its key a write keeps 1 - β of the memory, in other directions 1 - ηλ.

    References: arXiv:2608.27763.
    """

    form: ClassVar[Form] = Form(
        name="Falcon",
        right=r"$(1 - \eta_t\lambda)I - \eta_t kk^\top$, "
        r"$\eta_t = \beta_t / (\lVert k\rVert^2 + \lambda)$",
        written=r"$\eta_t vk^\top$",
        loss=r"$\tfrac12\lVert v - Wk\rVert^2 + \tfrac{\lambda}{2}\lVert W\rVert^2$",
        step_size=r"$\eta_t$",
        source="arXiv:2608.27763",
    )
    strength: ClassVar = True
    delta: ClassVar = True

    def write(self, state: State, token: Tokens) -> State:
        step = self.step(token)
        error = token.value - token.key @ state
        return (1 - step * self.ridge) * state + step * jnp.outer(token.key, error)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state

        def loss(matrix):
            return squared(token.value - token.key @ matrix) + self.ridge * squared(matrix)

        return (LocalLoss(loss, self.step(token)),)
