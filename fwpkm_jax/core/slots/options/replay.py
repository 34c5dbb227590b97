"""Replay: some earlier tokens are written again before every chunk.

A write moves the slots that its own tokens read. What other texts had put there is lost, bit by
bit, unless their tokens are written again. New tokens are written last and so in full.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import SubKeys, ValueTable
from fwpkm_jax.core.chunks import map_groups
from fwpkm_jax.core.slots.write import SlotChunk


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
    # A chunk of padding alone leaves the memory as it was, replay included.
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
    # Ties go to the lower index: to tokens that are stored already.
    _, strongest = jax.lax.top_k(both.write_weight, stored.write_weight.shape[0])
    return jax.lax.stop_gradient(jax.tree.map(lambda x: x[strongest], both))


class JoinedTokens(NamedTuple):
    """Chunks with the stored tokens before each.

    Attributes:
      tokens: leaves `[groups, chunks, stored + tokens, ...]`.
      first: 1 for the stored tokens, which are written before the others.
      stored: the store after the last chunk.
    """

    tokens: SlotChunk
    first: Float[Array, "groups chunks joined"]
    stored: ReplayedTokens

    @property
    def size(self) -> int:
        """How many tokens stand before each chunk."""
        return self.stored.write_weight.shape[1]


def join_stored(stored: ReplayedTokens, chunks: SlotChunk) -> JoinedTokens:
    """Several memories' chunks with the stored tokens before each.

    These find slots with the tokens of their chunk. They move no keys and leave no trace in the
    rest of the history. Which they are depends on write weights alone, so it is known before values
    are read.

    Args:
      stored: from `no_replayed_tokens` or the last call, leaves `[groups, ...]`.
      chunks: leaves `[groups, chunks, tokens, ...]`.
    """

    def step(stored: ReplayedTokens, chunk: SlotChunk) -> tuple[ReplayedTokens, SlotChunk]:
        return remember(stored, chunk), as_chunk(stored, beside=chunk)

    # The store of a chunk does not have its own tokens: `step` gives what was there before.
    stored, before = map_groups(functools.partial(jax.lax.scan, step), stored, chunks)
    chunks = chunks._replace(cut=None)  # Joined chunks are longer.
    if chunks.factor is not None:
        before = before._replace(factor=jnp.ones_like(before.counted))
    tokens, first = jax.tree.map(
        lambda *x: jnp.concatenate(x, axis=2),
        (before, jnp.ones_like(before.counted)),
        (chunks, jnp.zeros_like(chunks.counted)),
    )
    return JoinedTokens(tokens, first, stored)
