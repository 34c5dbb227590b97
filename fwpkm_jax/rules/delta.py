"""The delta rule: a matrix memory that writes the error of each token in turn."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.chunks import Chunk, StepOutput
from fwpkm_jax.rules.base import AbstractRule


class DeltaInfo(NamedTuple):
    """Measures of one chunk: mean squared error of the tokens before their writes."""

    memory_loss: Float[Array, ""]


@dataclass(frozen=True, kw_only=True)
class DeltaRule(AbstractRule):
    """A linear memory that writes the error of each token in turn (arXiv:2102.11174).

    One head. Each token is read after its own write, so that chunks do not change the result.
    """

    key_dim: int = 64
    """Width of keys and queries."""
    value_dim: int = 64
    """Width of values."""

    @classmethod
    def tiny(cls) -> "DeltaRule":
        return cls(key_dim=3, value_dim=4)

    def init(self, rng: jax.Array) -> Float[Array, "key value"]:
        del rng  # Starts empty.
        return jnp.zeros((self.key_dim, self.value_dim), jnp.float32)

    def step(self, memory: Float[Array, "key value"], chunk: Chunk) -> StepOutput:
        chunk = chunk.astype(memory.dtype)
        keys = chunk.query if chunk.key is None else chunk.key

        def write(memory, token):
            query, key, target, weight = token
            error = target - key @ memory
            memory = memory + jnp.outer(key, weight * error)
            return memory, (query @ memory, jnp.mean(error**2))

        memory, (output, losses) = jax.lax.scan(
            write, memory, (chunk.query[:, 0], keys[:, 0], chunk.target, chunk.write_weight)
        )
        return StepOutput(memory, output, None, DeltaInfo(jnp.mean(losses)))
