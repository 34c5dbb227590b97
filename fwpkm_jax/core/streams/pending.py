"""What waits in the queue of a stream, and in what shape."""

from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from fwpkm_jax.core.chunks import Memory

ChunkSize = int | Literal["flush"]
"""Tokens per write; "flush": tokens wait until `flush` writes all of them."""

Tokens: TypeAlias = PyTree[Array]
"""What a memory needs about each token, leaves `[groups, members, length, ...]`."""


class Signals(NamedTuple):
    """What the slow network computes for each token; `batch` may be `groups, members`.

    Attributes:
      query: `[batch, length, heads, key]`.
      value: `[batch, length, value]`, what earlier tokens should have predicted.
      gate: `[batch, length]`, weight of the token's loss.
      mask: `[batch, length]`, 0 for padding, 1 for real tokens; in a queue, numbers from 1 that
        tell the documents of a stream apart.
    """

    query: Float[Array, "*batch length heads key"]
    value: Float[Array, "*batch length value"]
    gate: Float[Array, "*batch length"]
    mask: Float[Array, "*batch length"]


class Pending(NamedTuple):
    """Tokens that wait for their chunk to fill.

    Attributes:
      tokens: leaves `[groups, members, capacity, ...]`; only the first `num_waiting` positions
        count.
      num_waiting: number of waiting tokens, the same in every sequence of a group.
    """

    tokens: Any
    num_waiting: Int[Array, " groups"]


class NewDocuments(NamedTuple):
    """Documents that start in a piece, each with a memory and a queue of its own.

    Attributes:
      starts: first tokens of documents; padding stands behind all tokens.
      memory: that each document starts from, leaves `[groups, ...]`.
    """

    starts: Bool[Array, "groups length"]
    memory: Memory


def init_pending(tokens: Tokens, capacity: int) -> Pending:
    """Empty queues of `capacity` tokens for tokens of these shapes and dtypes."""

    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros((*x.shape[:2], capacity, *x.shape[3:]), x.dtype)

    groups = jax.tree.leaves(tokens)[0].shape[0]
    return Pending(jax.tree.map(zeros, tokens), jnp.zeros((groups,), jnp.int32))
