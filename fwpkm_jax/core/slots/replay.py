"""Replay: some earlier tokens are written again before every chunk.

A write moves the slots that its own tokens read. What other texts had put there is lost, bit by
bit, unless their tokens are written again. New tokens are written last and so in full.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import SubKeys, ValueTable
from fwpkm_jax.core.slots.chunk import SlotChunk


class ReplayedTokens(NamedTuple):
    """Tokens that are written again, all places empty at first.

    Attributes:
      query: `[stored, heads, key]`.
      target: `[stored, value]`.
      write_weight: `[stored]`; 0 for an empty place.
    """

    query: Float[Array, "stored heads key"]
    target: Float[Array, "stored value"]
    write_weight: Float[Array, " stored"]


def no_replayed_tokens(size: int, keys: SubKeys, values: ValueTable) -> ReplayedTokens:
    """A store of `size` empty places, for queries and targets of these keys and values."""
    heads, halves, _, half = keys.shape
    shapes = (size, heads, halves * half), (size, values.shape[1]), (size,)
    return ReplayedTokens(*(jnp.zeros(shape, values.dtype) for shape in shapes))


def as_chunk(stored: ReplayedTokens, *, beside: SlotChunk) -> SlotChunk:
    """The stored tokens as a chunk that writes values and moves no keys.

    Args:
      stored: from `remember`.
      beside: the chunk before which they are written. If none of its tokens count, neither do
        these.
    """
    counted = (stored.write_weight > 0) & jnp.any(beside.counted > 0)
    real = counted.astype(stored.write_weight.dtype)
    stored = stored._replace(write_weight=real * stored.write_weight)
    return SlotChunk(*stored, paired=real, counted=real, addressed=jnp.zeros_like(real))


def remember(stored: ReplayedTokens, chunk: SlotChunk) -> ReplayedTokens:
    """The strongest of the stored and the chunk's tokens, by write weight.

    Of equally strong ones those that came first stay. Nothing here has a gradient.

    Args:
      stored: from `no_replayed_tokens` or the last call.
      chunk: what is written now, `[tokens, ...]`.
    """
    new = ReplayedTokens(chunk.query, chunk.target, chunk.write_weight * chunk.counted)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), stored, new)
    _, strongest = jax.lax.top_k(both.write_weight, stored.write_weight.shape[0])
    return jax.lax.stop_gradient(jax.tree.map(lambda x: x[strongest], both))
