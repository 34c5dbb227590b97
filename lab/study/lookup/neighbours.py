"""A memory that keeps every token and reads the nearest one: the exact rival of a sparse table."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.array_types import Queries, TokenValues
from fwpkm_jax.core.chunks import Chunk, StepOutput
from fwpkm_jax.core.slots.options.replay import ReplayedTokens, remember
from fwpkm_jax.core.slots.write import SlotChunk
from fwpkm_jax.evaluation.reconfigure import reconfigure
from fwpkm_jax.models.language_model import LanguageModel, Memory
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
class AbstractNeighbours(AbstractChunkRule):
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
    """Tokens that are kept."""


@dataclass(frozen=True, kw_only=True)
class NearestNeighbours(AbstractNeighbours):
    """Keeps the last tokens."""

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
        filled = jnp.arange(self.capacity) < memory.written
        return _nearest(memory.keys, memory.values, filled, query), None

    def step(self, memory: Store, chunk: Chunk) -> StepOutput:
        """Reads the chunk, then stores the tokens that have a target."""
        output, access = self.read(memory, chunk.query)
        stored = chunk.write_weight > 0
        number = jnp.cumsum(stored)
        place = (memory.written.astype(jnp.int32) + number - 1) % self.capacity
        # Of a chunk longer than the store, later tokens would take the places of earlier ones.
        stored &= number > number[-1] - self.capacity
        place = jnp.where(stored, place, self.capacity)  # Behind the end: dropped.
        memory = Store(
            memory.keys.at[place].set(chunk.query[:, 0].astype(memory.keys.dtype), mode="drop"),
            memory.values.at[place].set(chunk.target.astype(memory.values.dtype), mode="drop"),
            memory.written + number[-1].astype(jnp.float32),
        )
        held = jnp.minimum(memory.written, self.capacity)
        return StepOutput(memory, output, access, StoreInfo(held))


@dataclass(frozen=True, kw_only=True)
class StrongestNeighbours(AbstractNeighbours):
    """Keeps what a replay of as many tokens keeps: those with the largest write weights, and of
    equal ones those that came first."""

    def init(self, rng: jax.Array) -> ReplayedTokens:
        """An empty store."""
        del rng
        shapes = (self.capacity, 1, self.key_dim), (self.capacity, self.value_dim), (self.capacity,)
        return ReplayedTokens(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def read(self, memory: ReplayedTokens, query: Queries) -> tuple[TokenValues, None]:
        """Reads `[tokens, 1, key]` as `[tokens, value]`; there is no access to report."""
        filled = memory.write_weight > 0
        return _nearest(memory.query[:, 0], memory.target, filled, query), None

    def step(self, memory: ReplayedTokens, chunk: Chunk) -> StepOutput:
        """Reads the chunk, then keeps the strongest of its tokens and of those before."""
        output, access = self.read(memory, chunk.query)
        # No key moves.
        memory = remember(memory, SlotChunk(*chunk[:5], addressed=jnp.zeros_like(chunk.counted)))
        held = jnp.sum(memory.write_weight > 0, dtype=jnp.float32)
        return StepOutput(memory, output, access, StoreInfo(held))


def with_neighbours(
    model: LanguageModel,
    memory: Memory,
    *,
    capacity: int = 1024,
    keep: Literal["last", "strongest"] = "last",
) -> tuple[LanguageModel, Memory]:
    """A trained model with an exact store in the place of its table, and empty stores.

    Args:
      model: every weight stays as it was trained.
      memory: of its memory layers, leaves `[groups, ...]`; only the number of groups counts.
      capacity: tokens of a store.
      keep: which of more tokens stay.

    Raises:
      ValueError: a token has several queries.
    """
    weights = model.config.fast_weight
    if weights.rule.num_heads != 1:
        raise ValueError(
            f"num_heads={weights.rule.num_heads}: a store has one query for each token; give a "
            "model with one head."
        )
    rule = {"last": NearestNeighbours, "strongest": StrongestNeighbours}[keep](
        key_dim=weights.rule.key_dim,
        value_dim=weights.rule.value_dim,
        lookahead=weights.rule.lookahead,
        capacity=capacity,
    )
    config = replace(model.config, fast_weight=replace(weights, rule=rule))
    groups = jax.tree.leaves(memory)[0].shape[0]
    empty = jax.vmap(rule.init)(jax.random.split(jax.random.key(0), groups))
    return reconfigure(model, config), dict.fromkeys(memory, empty)


def _nearest(
    keys: Float[Array, "capacity key"],
    values: Float[Array, "capacity value"],
    filled: Bool[Array, " capacity"],
    query: Queries,
) -> TokenValues:
    """The value of the key nearest to each query `[tokens, 1, key]`; zeros while none is filled."""
    # Up to the square of the query, which is the same for all.
    distance = jnp.sum(keys**2, axis=1)[None] - 2 * query[:, 0].astype(keys.dtype) @ keys.T
    nearest = jnp.argmin(jnp.where(filled[None], distance, jnp.inf), axis=1)
    return jnp.where(jnp.any(filled), values[nearest], 0.0)
