"""How a write moves the sub-keys: the only definition of their gradient and of their step."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fwpkm_jax.core.array_types import Queries, SubKeys, TokenWeights
from fwpkm_jax.core.slots.addressing import (
    Address,
    Score,
    SubKeyChoice,
    SubKeyUsage,
    addressing_gradient,
)


@dataclass(frozen=True, kw_only=True)
class KeyWrite:
    """A gradient step of the sub-keys on the addressing loss.

    Every executor takes it from here: a rule's `step`, and both passes of `core.slots.two_phase`.

    Attributes:
      learning_rate: multiplies the step.
      loss_weight: multiplies the addressing loss; 0 leaves it out.
      score: of the sub-keys.
      clip: bound on each element of the gradient, or None.
      weight_decay: adds this multiple of the keys to the gradient.
    """

    learning_rate: float
    loss_weight: float
    score: Score
    clip: float | None = None
    weight_decay: float = 0.0

    def gradient(
        self,
        keys: SubKeys,
        queries: Queries,
        address: Address | SubKeyChoice,
        *,
        token_weights: TokenWeights,
        usage: SubKeyUsage | None = None,
    ) -> SubKeys:
        """The gradient of a chunk, before clipping and decay.

        Args:
          keys: `[heads, 2, subkeys, key // 2]`.
          queries: of the chunk.
          address: of the queries.
          token_weights: which tokens are in the loss.
          usage: by all tokens of the write where the chunk is a part of them; the gradients of the
            parts then add up to that of the write.
        """
        if self.loss_weight == 0:
            return jnp.zeros_like(keys)
        # Its backward pass lays the coefficients out again, rather than keep them per chunk.
        spread = jax.checkpoint(functools.partial(addressing_gradient, score=self.score))
        gradient = spread(queries, keys, address, token_weights=token_weights, usage=usage)
        return self.loss_weight * gradient

    def step(self, keys: SubKeys, gradient: SubKeys) -> SubKeys:
        """The sub-keys after one write."""
        if self.clip is not None:
            gradient = jnp.clip(gradient, -self.clip, self.clip)
        if self.weight_decay:
            gradient = gradient + self.weight_decay * keys
        return keys - self.learning_rate * gradient
