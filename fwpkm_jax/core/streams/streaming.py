"""The memory token by token: reads at once, writes when a chunk and its lookahead are complete.

Feeding a stream in pieces of any sizes gives the outputs and the final memory of feeding it at
once: a chunk of `chunk_size` tokens is written exactly when `chunk_size + lookahead` are waiting.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.chunks import AnyChunk, Chunk, Memory
from fwpkm_jax.core.targets import WriteWeights, pair_weights, shift_left

Read = Callable[[Memory, jax.Array], tuple[jax.Array, Any]]
Write = Callable[[Memory, AnyChunk], Memory]
Targets = Callable[[jax.Array], jax.Array]  # What tokens should read, from all their values.
MakeChunk = Callable[[jax.Array, jax.Array, WriteWeights], AnyChunk]


def plain_chunk(query: jax.Array, target: jax.Array, weights: WriteWeights) -> Chunk:
    """The chunk of a rule that needs no fields of its own."""
    return Chunk(query, target, *weights)


class Signals(NamedTuple):
    """What the slow network tells a memory about each token.

    Attributes:
      query: `[batch, length, heads, key]`.
      value: `[batch, length, value]`, what earlier tokens should have predicted.
      gate: `[batch, length]`, weight of the token's loss.
      mask: `[batch, length]`, 1 for real tokens, 0 for padding.
    """

    query: Float[Array, "batch length heads key"]
    value: Float[Array, "batch length value"]
    gate: Float[Array, "batch length"]
    mask: Float[Array, "batch length"]


class Pending(NamedTuple):
    """Tokens that wait for their chunk to fill.

    Attributes:
      signals: leaves `[batch, capacity, ...]`, valid in the first `num_waiting` positions.
      num_waiting: number of waiting tokens, the same in every sequence of a group.
    """

    signals: Signals
    num_waiting: Int[Array, ""]


def init_pending(signals: Signals, capacity: int) -> Pending:
    """An empty queue of `capacity` tokens for signals of these shapes and dtypes."""

    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros((x.shape[0], capacity, *x.shape[2:]), x.dtype)

    return Pending(jax.tree.map(zeros, signals), jnp.zeros((), jnp.int32))


def push(
    read: Read,
    write: Write,
    memory: Memory,
    pending: Pending,
    signals: Signals,
    *,
    chunk_size: int,
    lookahead: int,
    targets: Targets | None = None,
    make_chunk: MakeChunk = plain_chunk,
    num_real: Int[Array, ""] | None = None,
) -> tuple[Memory, Pending, jax.Array, Any]:
    """Reads a piece of a stream and writes the chunks that it completes.

    Args:
      read: from memory and queries `[tokens, heads, key]` to output and access, by token.
      write: from memory and a chunk to the memory after the write.
      memory: fast weights of one group.
      pending: tokens that wait.
      signals: the piece, leaves `[batch, length, ...]` with length >= 1.
      chunk_size: tokens per write, for this call.
      lookahead: distance from a token to its target.
      targets: from values to targets, `[batch, length, value]` both; None: the value `lookahead`
        tokens on.
      make_chunk: a rule's `chunk`, from queries, targets and weights.
      num_real: tokens of the piece, its first ones; those behind are read and forgotten, as if the
        piece had ended before them. None: all.

    Returns:
      Memory, pending, output `[batch, length, value]` and access (leaves `[batch, length, ...]`).

    Raises:
      ValueError: a chunk and its lookahead do not fit the queue.
    """
    capacity = pending.signals.gate.shape[1]
    if chunk_size < 1 or chunk_size + lookahead > capacity:
        raise ValueError(
            f"chunk_size={chunk_size} with lookahead={lookahead} does not fit a queue of "
            f"{capacity} tokens; choose 1 to {capacity - lookahead} or start the stream with a "
            "larger max_chunk_size."
        )
    length = signals.gate.shape[1]
    num_full, rest = divmod(length, chunk_size)
    options = {
        "chunk_size": chunk_size,
        "lookahead": lookahead,
        "targets": targets,
        "make_chunk": make_chunk,
    }

    def push_piece(carry: tuple[Memory, Pending], part: tuple[Signals, jax.Array | int]):
        piece, start = part
        size = piece.gate.shape[1]
        count = size if num_real is None else jnp.clip(num_real - start, 0, size)
        memory, pending, *read_out = _push_piece(read, write, *carry, piece, count, **options)
        return (memory, pending), tuple(read_out)

    carry = memory, pending
    if chunk_size + lookahead < capacity:  # Else no call can have left a complete chunk.
        carry = _write_complete(write, *carry, **options)
    outputs = []
    if num_full == 1:
        first = jax.tree.map(lambda x: x[:, :chunk_size], signals)
        carry, out = push_piece(carry, (first, 0))
        outputs.append(out)
    elif num_full:

        def split(x: jax.Array) -> jax.Array:
            x = x[:, : num_full * chunk_size]
            return x.reshape(x.shape[0], num_full, chunk_size, *x.shape[2:]).swapaxes(0, 1)

        def merge(x: jax.Array) -> jax.Array:
            return x.swapaxes(0, 1).reshape(x.shape[1], num_full * chunk_size, *x.shape[3:])

        starts = chunk_size * jnp.arange(num_full, dtype=jnp.int32)
        carry, out = jax.lax.scan(push_piece, carry, (jax.tree.map(split, signals), starts))
        outputs.append(jax.tree.map(merge, out))
    if rest:
        last = jax.tree.map(lambda x: x[:, num_full * chunk_size :], signals)
        carry, out = push_piece(carry, (last, num_full * chunk_size))
        outputs.append(out)
    output, access = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *outputs)
    memory, pending = carry
    return memory, pending, output, access


def read_sequences(read: Read, memory: Memory, query: jax.Array) -> tuple[jax.Array, Any]:
    """`read` for queries `[batch, length, heads, key]`, results with the same leading axes."""
    batch, length = query.shape[:2]
    out = read(memory, query.reshape(batch * length, *query.shape[2:]))
    return jax.tree.map(lambda x: x.reshape(batch, length, *x.shape[1:]), out)


def clear(pending: Pending) -> Pending:
    """The queue without its tokens."""
    return pending._replace(num_waiting=jnp.zeros_like(pending.num_waiting))


def _push_piece(read, write, memory, pending, piece, count, *, chunk_size, lookahead, **options):
    """`push` of at most `chunk_size` tokens, which complete at most one chunk.

    The first `count` tokens of the piece are queued.
    """
    length, capacity = piece.gate.shape[1], pending.signals.gate.shape[1]
    limit = chunk_size + lookahead
    output, access = read_sequences(read, memory, piece.query)
    piece = _ordered_after(piece, output)
    # In the queue, were it long enough.
    position = pending.num_waiting + jnp.arange(length, dtype=jnp.int32)
    # Fewer than `limit` tokens wait here, so that a single token always finds room and a donated
    # queue is changed in place.
    added = max(0, limit - 1 + length - capacity)
    queue = jax.tree.map(
        lambda waiting, new: jax.lax.dynamic_update_slice_in_dim(
            jnp.pad(waiting, [(0, 0), (0, added)] + [(0, 0)] * (new.ndim - 2)),
            new.astype(waiting.dtype),
            pending.num_waiting,
            axis=1,
        ),
        pending.signals,
        piece,
    )
    longer = Pending(queue, pending.num_waiting + count)
    memory, longer = _write_complete(
        write, memory, longer, chunk_size=chunk_size, lookahead=lookahead, **options
    )
    if length > 1:
        # Tokens behind the one that completed the chunk already see the write.
        late = position >= limit

        def reread():
            new = read_sequences(read, memory, piece.query)

            def choose(after: jax.Array, before: jax.Array) -> jax.Array:
                return jnp.where(late.reshape(1, -1, *[1] * (after.ndim - 2)), after, before)

            return jax.tree.map(choose, new, (output, access))

        any_late = pending.num_waiting + count > limit
        output, access = jax.lax.cond(any_late, reread, lambda: (output, access))
    kept = jax.tree.map(lambda x: x[:, :capacity], longer.signals)
    return memory, Pending(kept, longer.num_waiting), output, access


def _ordered_after(piece: Signals, output: jax.Array) -> Signals:
    """The piece, unchanged, but to XLA a function of what was read.

    The write depends on the queue, so it now waits for the read. Without that order XLA copies the
    table for every piece, in case the old one were read after the write began.
    """
    first = output[:, :, 0]
    never = (first > 0) & (first < 0)
    return piece._replace(gate=jnp.where(never, 0, piece.gate))


def _write_complete(write, memory, pending, *, chunk_size, lookahead, targets, make_chunk):
    """Writes the chunks that are complete: none, one, or more after larger chunk sizes."""

    def complete(carry: tuple[Memory, Pending]) -> jax.Array:
        return carry[1].num_waiting >= chunk_size + lookahead

    def write_chunk(carry: tuple[Memory, Pending]) -> tuple[Memory, Pending]:
        memory, pending = carry
        chunk = waiting_chunk(pending.signals, chunk_size, lookahead, targets, make_chunk)
        memory = write(memory, chunk)
        return memory, _drop(pending, chunk_size)

    return jax.lax.while_loop(complete, write_chunk, (memory, pending))


def waiting_chunk(
    signals: Signals,
    size: int,
    lookahead: int,
    targets: Targets | None,
    make_chunk: MakeChunk,
    written: jax.Array | None = None,
) -> AnyChunk:
    """The first `size` waiting tokens as one chunk.

    Args:
      signals: of the tokens, those that hold their targets included.
      size: tokens of the chunk.
      lookahead: distance from a token to its target.
      targets, make_chunk: as in `push`.
      written: `[1, length]`, 1 for the tokens that the chunk is limited to; None: all.
    """

    def tokens(x: jax.Array) -> jax.Array:
        return x[:, :size].reshape(x.shape[0] * size, *x.shape[2:])

    mask, value = signals.mask, signals.value
    # All targets are known by now; they may stand behind the written tokens.
    known = jnp.ones_like(mask) if written is None else jnp.ones_like(mask) * written
    weights = pair_weights(signals.gate, mask, known=known, lookahead=lookahead)
    if written is not None:
        weights = weights._replace(counted=mask * written)
    target = shift_left(value, lookahead) if targets is None else targets(value)
    return make_chunk(tokens(signals.query), tokens(target), WriteWeights(*map(tokens, weights)))


def _drop(pending: Pending, number: int | jax.Array) -> Pending:
    """The queue without its first `number` tokens."""
    rolled = jax.tree.map(lambda x: jnp.roll(x, -number, axis=1), pending.signals)
    return Pending(rolled, pending.num_waiting - number)
