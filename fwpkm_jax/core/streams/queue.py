"""The queue of every memory that is read token by token and written a chunk at a time.

Sequences that share a memory are a group. Their tokens wait side by side until a chunk, and the
tokens that hold its targets, are there. Leaves of tokens are `[groups, members, length, ...]`,
those of memories `[groups, ...]`; a memory per sequence is a group with one member.

Memories differ in the functions that they pass: `read` and `write`. A memory that reads a token
after the write that it completes (Titans) uses the parts of `push`: `append`, `drop` and
`cuts.in_chunks`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.chunks import Memory, map_groups, map_memories, map_unshared
from fwpkm_jax.core.documents import document_numbers
from fwpkm_jax.core.streams.cuts import in_chunks, take_tokens
from fwpkm_jax.core.streams.documents import UnitSize, in_documents
from fwpkm_jax.core.streams.pending import ChunkSize, NewDocuments, Pending, Tokens

Read = Callable[[Memory, Any], Any]
"""From memories and tokens to what each token reads, leaves `[groups, members, length, ...]`."""

Write = Callable[[Memory, Any], Memory]
"""From memories and the waiting tokens of a chunk, its lookahead included, to the memories after
the write."""


def push(
    read: Read,
    write: Write,
    memory: Memory,
    pending: Pending,
    tokens: Tokens,
    *,
    chunk_size: ChunkSize,
    lookahead: int = 0,
    num_real: Int[Array, " groups"] | None = None,
    differentiable: bool = False,
    documents: NewDocuments | None = None,
) -> tuple[Memory, Pending, Any]:
    """Reads a piece of a stream and writes the chunks that it completes.

    Each token is read with the memory as the last complete chunk left it. Feeding a stream in
    pieces of any sizes gives the results of feeding it at once.

    Args:
      read: of the memories, before a write.
      write: of one chunk for each group that it gets; with `differentiable` all groups, else one
        that has a complete chunk. Results of groups without one are dropped.
      memory: leaves `[groups, ...]`.
      tokens: the piece, with a length of at least 1.
      chunk_size: tokens per write, for this call. "flush": tokens only wait. The caller then keeps
        count of them: a piece that finds no room overwrites the latest ones.
      lookahead: tokens behind a chunk that must be there before it is written.
      num_real: tokens of the piece, its first ones; those behind are read and forgotten, as if the
        piece had ended before them. None: all.
      differentiable: writes in a branch instead of a loop, which has no gradient. All calls must
        then have this `chunk_size`, and the queue room for no more than a chunk and its lookahead.
      documents: that start in the piece. What waits when one starts is dropped: no token could read
        it. None: all tokens go on with the document before.

    Returns:
      Memories, pending, and what the tokens of the piece read.

    Raises:
      ValueError: a chunk and its lookahead do not fit the queue.
    """
    length, capacity = _length(tokens), _length(pending.tokens)
    count = jnp.full_like(pending.num_waiting, length) if num_real is None else num_real
    if chunk_size == "flush":
        add = functools.partial(append, capacity=capacity, may_exceed=True)
        if documents is None:
            return memory, add(pending, tokens, count), read(memory, tokens)
        memory, pending, output, first = without_writes(
            read, memory, pending, tokens, documents, count=count
        )
        own = jax.tree.map(lambda x: _from(x, first), tokens)
        return memory, add(pending, own, count - first), output
    if chunk_size < 1 or chunk_size + lookahead > capacity:
        raise ValueError(
            f"chunk_size={chunk_size} with lookahead={lookahead} does not fit a queue of "
            f"{capacity} tokens; choose 1 to {capacity - lookahead} or start the stream with a "
            "larger max_chunk_size."
        )
    limit = chunk_size + lookahead

    def write_complete(state: tuple[Memory, Pending]) -> tuple[Memory, Pending]:
        """Writes the chunks that are complete: none, one, or more after larger chunk sizes."""

        def complete(state: tuple[Memory, Pending]) -> jax.Array:
            return state[1].num_waiting >= limit

        def write_chunk(state: tuple[Memory, Pending]) -> tuple[Memory, Pending]:
            memory, pending = state
            chunk = jax.tree.map(lambda x: x[:, :, :limit], pending.tokens)
            return write(memory, chunk), drop(pending, chunk_size, _length(pending.tokens))

        def write_where_complete(state: tuple[Memory, Pending]) -> tuple[Memory, Pending]:
            if len(state[1].num_waiting) == 1:
                return write_chunk(state)
            return map_unshared(
                lambda new, old: jnp.where(_like(complete(state), old), new, old),
                write_chunk(state),
                state,
            )

        def write_first(state: tuple[Memory, Pending]) -> tuple[Memory, Pending]:
            """Writes the first group that has a chunk; groups seldom complete one together."""
            if len(state[1].num_waiting) == 1:
                return write_chunk(state)
            group = jnp.argmax(complete(state))
            own = map_unshared(lambda x: jax.lax.dynamic_slice_in_dim(x, group, 1, axis=0), state)
            return map_unshared(
                lambda new, old: jax.lax.dynamic_update_slice_in_dim(old, new, group, axis=0),
                write_chunk(own),
                state,
            )

        if differentiable:  # The piece ended where a chunk ends, and none was left before.
            some = jnp.any(complete(state))
            return jax.lax.cond(some, write_where_complete, lambda x: x, state)
        return jax.lax.while_loop(lambda state: jnp.any(complete(state)), write_first, state)

    def read_and_queue(
        state: tuple[Memory, Pending], piece: Tokens, count: jax.Array
    ) -> tuple[tuple[Memory, Pending], Any]:
        """Tokens up to the one that completes a chunk, which all read the same memory."""
        memory, pending = state
        output = read(memory, piece)
        # The write depends on the count, so that it waits for the read. Without that order XLA
        # copies the table, in case the old one were read after the write began.
        count = computed_after(jax.tree.leaves(output)[0][..., 0], count)
        # Fewer than `limit` tokens wait here, so that a single token always finds room and a
        # donated queue is changed in place.
        room = max(capacity, limit - 1 + _length(piece))
        memory, longer = write_complete((memory, append(pending, piece, count, capacity=room)))
        kept = jax.tree.map(lambda x: x[:, :, :capacity], longer.tokens)
        return (memory, Pending(kept, longer.num_waiting)), output

    if differentiable:  # The backward pass computes each chunk again.
        read_and_queue = jax.checkpoint(read_and_queue)
    state = memory, pending
    if limit < capacity:  # Else no call can have left a complete chunk.
        state = write_complete(state)
    options: dict[str, Any] = {"count": count, "position": state[1].num_waiting - lookahead}
    if documents is None:
        (memory, pending), output = in_chunks(
            read_and_queue, state, tokens, chunk=chunk_size, **options
        )
        return memory, pending, output
    (memory, pending), output = in_documents(
        read_and_queue,
        state,
        (documents.memory, _emptied(pending)),
        tokens,
        **options,
        starts=documents.starts,
        alone=lambda tokens: read(documents.memory, tokens),
        unit=UnitSize(chunk_size, lead=lookahead),
    )
    return memory, pending, output


def without_writes(
    read: Read,
    memory: Memory,
    pending: Pending,
    tokens: Tokens,
    documents: NewDocuments,
    *,
    count: Int[Array, " groups"],
) -> tuple[Memory, Pending, Any, Int[Array, " groups"]]:
    """Reads a piece in which documents start, and leaves what the last of them starts with.

    Returns:
      Memories and pending before the last document, without tokens of the piece; what the tokens of
      the piece read; and the first token of that document, 0 where none starts.
    """
    at = jnp.arange(documents.starts.shape[1], dtype=jnp.int32)[None]
    starts = documents.starts & (at < count[:, None])
    begun, own = jnp.any(starts, axis=1), document_numbers(starts) > 0
    output = jax.tree.map(
        lambda new, old: jnp.where(_like(own[:, None], new), new, old),
        read(documents.memory, tokens),
        read(memory, tokens),
    )
    memory, pending = jax.tree.map(
        lambda new, old: jnp.where(_like(begun, old), new, old),
        (documents.memory, _emptied(pending)),
        (memory, pending),
    )
    return memory, pending, output, jnp.max(jnp.where(starts, at, 0), axis=1)


def append(
    pending: Pending,
    tokens: Tokens,
    count: Int[Array, " groups"],
    *,
    capacity: int,
    may_exceed: bool = False,
) -> Pending:
    """The queues with the first `count` of the tokens behind those that wait.

    Args:
      pending: tokens that wait; zeros stand behind them.
      count: how many of the piece's tokens each group adds; zeros take the place of the others.
      capacity: of the result; enough for the tokens that wait and those that are added.
      may_exceed: whether the piece's other tokens may reach beyond the capacity.
    """

    def place(waiting: jax.Array, new: jax.Array, at: jax.Array, count: jax.Array) -> jax.Array:
        new = new[:, :capacity]
        length = new.shape[1]
        real = jnp.arange(length, dtype=jnp.int32) < count
        new = jnp.where(real.reshape(-1, *[1] * (new.ndim - 2)), new, 0).astype(waiting.dtype)
        added = [(0, 0), (0, capacity - waiting.shape[1])] + [(0, 0)] * (new.ndim - 2)
        waiting = jnp.pad(waiting, added)
        if may_exceed and length > 1:
            # A slice that would reach beyond the end is moved back by XLA. The piece then goes to
            # the end of the slice, and what stood at its beginning stays.
            start = jnp.minimum(at, capacity - length)
            index = jnp.arange(length, dtype=jnp.int32) - (at - start)
            old = jax.lax.dynamic_slice_in_dim(waiting, start, length, axis=1)
            moved = jnp.take(new, jnp.maximum(index, 0), axis=1)
            new = jnp.where((index >= 0).reshape(-1, *[1] * (new.ndim - 2)), moved, old)
        return jax.lax.dynamic_update_slice_in_dim(waiting, new, at, axis=1)

    queues = jax.tree.map(
        lambda *x: map_groups(place, *x, pending.num_waiting, count), pending.tokens, tokens
    )
    return Pending(queues, pending.num_waiting + count)


def drop(pending: Pending, number: int | Int[Array, " groups"], capacity: int) -> Pending:
    """The queues without their first `number` tokens, with room for `capacity`; zeros behind."""

    def keep(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, capacity)] + [(0, 0)] * (x.ndim - 3))
        if isinstance(number, int):
            return jax.lax.slice_in_dim(x, number, number + capacity, axis=2)
        return map_memories(
            lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, capacity, axis=1), x, number
        )

    return Pending(jax.tree.map(keep, pending.tokens), pending.num_waiting - number)


def clear(pending: Pending) -> Pending:
    """The queues without their tokens."""
    return pending._replace(num_waiting=jnp.zeros_like(pending.num_waiting))


def _emptied(pending: Pending) -> Pending:
    """The queues without tokens, with zeros in their place."""
    return jax.tree.map(jnp.zeros_like, pending)


def _from(x: jax.Array, first: Int[Array, " groups"]) -> jax.Array:
    """Each group's tokens from its first on; the last one repeated."""
    at = first[:, None] + jnp.arange(x.shape[2], dtype=jnp.int32)[None]
    return take_tokens(x, at)


def computed_after(x: Float[Array, "..."], number: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """The number itself, with a data dependency on `x`, so that XLA computes it after `x`."""
    return jnp.where(jnp.any((x > 0) & (x < 0)), 0, number)


def _length(tokens: Tokens) -> int:
    return jax.tree.leaves(tokens)[0].shape[2]


def _like(flags: jax.Array, x: jax.Array) -> jax.Array:
    """The flags with trailing axes of 1, as many as `x` has more."""
    return flags.reshape(*flags.shape, *[1] * (x.ndim - flags.ndim))
