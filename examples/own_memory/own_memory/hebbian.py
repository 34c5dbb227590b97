"""A Hebbian memory with decay: one matrix that associates queries with the values that follow."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fwpkm_jax.core.chunks import Chunk, StepOutput
from fwpkm_jax.rules import AbstractChunkRule


class HebbianInfo(NamedTuple):
    """What a step reports; the field's name becomes a metric.

    Attributes:
      association: mean size of the entries of the matrix after the write.
    """

    association: jax.Array


@dataclass(frozen=True, kw_only=True)
class Hebbian(AbstractChunkRule):
    """A matrix M that decays and takes in the mean association of a chunk's tokens.

        M <- (1 - rate) M + rate * mean(query target^T),    read: M^T query

    Queries are scaled to unit length times sqrt(key_dim). The memory starts at zero. A chunk
    without a token to write leaves it as it is.
    """

    key_dim: int = 64
    """Width of queries."""
    value_dim: int = 64
    """Width of values."""
    lookahead: int = 1
    """Distance from a token to the token that holds its target."""
    rate: float = 0.3
    """Share of the memory that one chunk replaces."""

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate={self.rate} must lie in (0, 1].")

    def init(self, rng: jax.Array) -> jax.Array:
        """A matrix of zeros, `[key, value]`."""
        del rng
        return jnp.zeros((self.key_dim, self.value_dim), jnp.float32)

    def read(self, memory: jax.Array, query: jax.Array) -> tuple[jax.Array, None]:
        """Reads `[tokens, 1, key]` as `[tokens, value]`; there is no access to report."""
        return self._features(query, memory.dtype) @ memory, None

    def step(self, memory: jax.Array, chunk: Chunk) -> StepOutput:
        """Reads the chunk, then writes it."""
        output, access = self.read(memory, chunk.query)
        weight = chunk.write_weight.astype(memory.dtype)
        target = chunk.target.astype(memory.dtype)
        features = self._features(chunk.query, memory.dtype)
        number = jnp.maximum(jnp.sum((weight > 0).astype(memory.dtype)), 1.0)
        mean = jnp.einsum("tk,tv,t->kv", features, target, weight) / number
        rate = jnp.where(jnp.any(weight > 0), self.rate, 0.0).astype(memory.dtype)
        memory = memory + rate * (mean - memory)
        return StepOutput(memory, output, access, HebbianInfo(jnp.mean(jnp.abs(memory))))

    def _features(self, query: jax.Array, dtype: jnp.dtype) -> jax.Array:
        query = query[:, 0].astype(dtype)
        size = jnp.sum(query**2, axis=-1, keepdims=True) / self.key_dim
        return query * jax.lax.rsqrt(size + 1e-6)
