"""A memory that keeps every token and reads the nearest one: the exact rival of a sparse table."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, TokenValues
from fwpkm_jax.core.chunks import Chunk, StepOutput
from fwpkm_jax.rules import AbstractChunkRule


class Store(NamedTuple):
    """What was written, oldest first.

    Attributes:
      keys: `[capacity, key]`, the queries of written tokens.
      values: `[capacity, value]`, what these should have read.
      written: scalar, tokens written so far; later ones overwrite the oldest. A float, as all
        numbers of a memory are.
    """

    keys: Float[Array, "capacity key"]
    values: Float[Array, "capacity value"]
    written: Float[Array, ""]


class StoreInfo(NamedTuple):
    """What a write reports.

    Attributes:
      stored: entries that hold a token.
    """

    stored: jax.Array


@dataclass(frozen=True, kw_only=True)
class NearestNeighbours(AbstractChunkRule):
    """Reads the value of the stored token whose query is nearest; before any write, zeros.

    A memory layer that was trained with FwPKM can read it without further training: queries and
    values are the layer's own, and a value is kept as it is. The choice of the nearest has no
    gradient, so that a model cannot be trained with it.
    """

    key_dim: int = 16
    """Width of queries."""
    value_dim: int = 64
    """Width of values."""
    lookahead: int = 1
    """Distance from a token to the token that holds its target."""
    capacity: int = 1024
    """Tokens that are kept, at least those of a chunk."""

    def init(self, rng: jax.Array) -> Store:
        """An empty store."""
        del rng
        return Store(
            jnp.zeros((self.capacity, self.key_dim), jnp.float32),
            jnp.zeros((self.capacity, self.value_dim), jnp.float32),
            jnp.zeros((), jnp.float32),
        )

    def read(self, memory: Store, query: Queries) -> tuple[TokenValues, None]:
        """Reads `[tokens, 1, key]` as `[tokens, value]`; there is no access to report."""
        keys = memory.keys
        # Up to the square of the query, which is the same for all.
        distance = jnp.sum(keys**2, axis=1)[None] - 2 * query[:, 0].astype(keys.dtype) @ keys.T
        empty = jnp.arange(self.capacity)[None] >= memory.written
        nearest = jnp.argmin(jnp.where(empty, jnp.inf, distance), axis=1)
        return jnp.where(memory.written > 0, memory.values[nearest], 0.0), None

    def step(self, memory: Store, chunk: Chunk) -> StepOutput:
        """Reads the chunk, then stores the tokens that have a target.

        Raises:
          ValueError: a chunk is longer than the store.
        """
        tokens = chunk.write_weight.shape[0]
        if tokens > self.capacity:
            raise ValueError(f"A chunk has {tokens} tokens; raise capacity={self.capacity} to it.")
        output, access = self.read(memory, chunk.query)
        stored = chunk.write_weight > 0
        place = (memory.written.astype(jnp.int32) + jnp.cumsum(stored) - 1) % self.capacity
        place = jnp.where(stored, place, self.capacity)  # Behind the end: dropped.
        memory = Store(
            memory.keys.at[place].set(chunk.query[:, 0].astype(memory.keys.dtype), mode="drop"),
            memory.values.at[place].set(chunk.target.astype(memory.values.dtype), mode="drop"),
            memory.written + jnp.sum(stored, dtype=jnp.float32),
        )
        held = jnp.minimum(memory.written, self.capacity)
        return StepOutput(memory, output, access, StoreInfo(held))
