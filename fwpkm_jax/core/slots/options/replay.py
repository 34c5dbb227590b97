"""Replay: some earlier tokens are written again before every chunk.

A write moves the slots that its own tokens read. What other texts had put there is lost, bit by
bit, unless their tokens are written again. New tokens are written last and so in full.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import SubKeys, ValueTable
from fwpkm_jax.core.chunks import StepOutput, map_groups, scan_chunks, uncut
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


def stored_before_chunks(
    stored: ReplayedTokens, sequence: SlotChunk, *, chunk_size: int
) -> tuple[ReplayedTokens, SlotChunk]:
    """The store after the last chunk, and what is written again before each chunk.

    Which tokens these are depends on write weights alone, so it is known before values are read.

    Args:
      stored: from `no_replayed_tokens` or the last call.
      sequence: leaves `[batch, length, ...]`.
      chunk_size: tokens of a sequence between two writes; the last chunk may be shorter.

    Returns:
      The second has leaves `[chunks, stored, ...]`.
    """

    def step(stored: ReplayedTokens, chunk: SlotChunk) -> StepOutput:
        nothing_read = jnp.zeros((chunk.query.shape[0], 0))
        return StepOutput(remember(stored, chunk), nothing_read, (), as_chunk(stored, beside=chunk))

    out = scan_chunks(step, stored, sequence, chunk_size=chunk_size)
    return out.memory, out.info


@dataclass(frozen=True, kw_only=True)
class PlacesBefore:
    """Room before each chunk of a sequence, the same in every sequence of a batch."""

    tokens: int
    """Tokens that stand before a chunk, of all sequences together."""
    batch: int
    """Sequences."""
    length: int
    """Tokens of a sequence."""
    chunk_size: int
    """Tokens of a sequence between two writes."""

    @property
    def places(self) -> int:
        """Places before a chunk in each sequence."""
        return -(-self.tokens // self.batch)

    @property
    def joined_chunk_size(self) -> int:
        """Tokens of a sequence in a chunk and before it."""
        return self.places + min(self.chunk_size, self.length)

    def join(
        self, before: Float[Array, "chunks tokens ..."], own: Float[Array, "batch length ..."]
    ) -> Float[Array, "batch joined ..."]:
        """A batch of longer sequences; places that `before` does not fill are 0."""
        chunks, rest = before.shape[0], before.shape[2:]
        spare = self.places * self.batch - self.tokens
        before = jnp.pad(before, [(0, 0), (0, spare)] + [(0, 0)] * len(rest))
        before = before.reshape(chunks, self.batch, self.places, *rest).swapaxes(0, 1)
        joined = jnp.concatenate([before, self._chunks_of(own)], axis=2)
        joined = joined.reshape(self.batch, -1, *rest)
        return joined[:, : self.length + chunks * self.places]

    def own(self, joined: Array) -> Array:
        """`[batch, length, ...]` out of `[batch, joined, ...]`: the tokens of the chunks."""
        size, rest = self.joined_chunk_size, joined.shape[2:]
        missing = -joined.shape[1] % size
        joined = jnp.pad(joined, [(0, 0), (0, missing)] + [(0, 0)] * len(rest))
        joined = joined.reshape(self.batch, -1, size, *rest)[:, :, self.places :]
        return joined.reshape(self.batch, -1, *rest)[:, : self.length]

    def _chunks_of(self, own: Array) -> Array:
        """`[batch, chunks, chunk, ...]`, the last one filled with 0."""
        size, rest = min(self.chunk_size, self.length), own.shape[2:]
        own = jnp.pad(own, [(0, 0), (0, -self.length % size)] + [(0, 0)] * len(rest))
        return own.reshape(self.batch, -1, size, *rest)


class JoinedSequence(NamedTuple):
    """A sequence with stored tokens before each chunk.

    Attributes:
      tokens: leaves `[groups, batch, joined, ...]`.
      first: 1 for the stored tokens, which are written before the others.
      stored: the store after the last chunk.
      layout: where they stand.
    """

    tokens: SlotChunk
    first: Float[Array, "groups batch joined"]
    stored: ReplayedTokens
    layout: PlacesBefore

    def own(self, joined: Any) -> Any:
        """The sequence's own tokens out of leaves `[groups, batch, joined, ...]`."""
        return jax.tree.map(jax.vmap(self.layout.own), joined)


def join_stored(stored: ReplayedTokens, sequence: SlotChunk, *, chunk_size: int) -> JoinedSequence:
    """Several memories' sequences with stored tokens before each chunk.

    These find slots with the tokens of their chunk. They move no keys and leave no trace in the
    rest of the history.

    Args:
      stored: leaves `[groups, ...]`.
      sequence: leaves `[groups, batch, length, ...]`.
      chunk_size: tokens of a sequence between two writes.
    """
    sequence = uncut(sequence, chunk_size)
    store = functools.partial(stored_before_chunks, chunk_size=chunk_size)
    stored, before = map_groups(store, stored, sequence)
    _, batch, length = sequence.counted.shape
    layout = PlacesBefore(
        tokens=before.counted.shape[2], batch=batch, length=length, chunk_size=chunk_size
    )
    if sequence.factor is not None:
        before = before._replace(factor=jnp.ones_like(before.counted))
    tokens, first = jax.tree.map(
        jax.vmap(layout.join),
        (before, jnp.ones_like(before.counted)),
        (sequence, jnp.zeros_like(sequence.counted)),
    )
    return JoinedSequence(tokens, first, stored, layout)
