"""A stream whose tokens are held back until they are told to be written, all as one chunk."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fwpkm_jax.core.chunks import AnyChunk, Memory
from fwpkm_jax.core.slots.block_write import ChunkBlocks
from fwpkm_jax.core.streams.streaming import (
    MakeChunk,
    Pending,
    Read,
    Signals,
    Targets,
    plain_chunk,
    read_sequences,
    waiting_chunk,
)

ChunkSize = int | Literal["flush"]
"""Tokens per write; "flush": all that wait when they are told to be written."""

WriteBlocks = Callable[[Memory, ChunkBlocks], Memory]

_BLOCK = 1024  # Tokens of a sequence that a flush forms at a time.


def hold(
    read: Read,
    memory: Memory,
    pending: Pending,
    signals: Signals,
    *,
    num_real: Int[Array, ""] | None = None,
) -> tuple[Pending, jax.Array, Any]:
    """Reads a piece of a stream and queues it, whatever waits already; `flush` writes it.

    The caller keeps count of the tokens: a piece that finds no room in the queue overwrites the
    latest ones.

    Args:
      read: as in `streaming.push`.
      memory: fast weights of one group.
      pending: tokens that wait.
      signals: the piece, leaves `[batch, length, ...]`.
      num_real: as in `streaming.push`.

    Returns:
      Pending, output `[batch, length, value]` and access (leaves `[batch, length, ...]`).
    """
    output, access = read_sequences(read, memory, signals.query)
    length = signals.gate.shape[1]
    queue = jax.tree.map(
        lambda waiting, new: jax.lax.dynamic_update_slice_in_dim(
            waiting, new.astype(waiting.dtype), pending.num_waiting, axis=1
        ),
        pending.signals,
        signals,
    )
    count = length if num_real is None else num_real
    return Pending(queue, pending.num_waiting + count), output, access


def flush(
    write_blocks: WriteBlocks,
    memory: Memory,
    pending: Pending,
    *,
    lookahead: int,
    targets: Targets | None = None,
    make_chunk: MakeChunk = plain_chunk,
    block: int = _BLOCK,
) -> tuple[Memory, Pending]:
    """Writes the complete pairs now, as one chunk, and keeps the last `lookahead` tokens.

    Does nothing while no more than `lookahead` tokens wait. Time and memory follow the tokens that
    wait, not the queue's capacity.

    Args:
      write_blocks: a rule's.
      memory: fast weights of one group.
      pending: tokens that wait.
      lookahead: distance from a token to its target.
      targets, make_chunk: as in `streaming.push`.
      block: tokens of each sequence formed at a time.

    Returns:
      Memory and pending.
    """
    signals, num_waiting = pending
    room = signals.gate.shape[1] - lookahead
    size = min(block, room)
    complete = jnp.maximum(num_waiting - lookahead, 0)

    def block_of(number: jax.Array) -> AnyChunk:
        # The last block may reach beyond the queue: it then starts earlier, with tokens of the
        # block before that are not written again.
        first = number * size
        start = jnp.minimum(first, room - size)
        part = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, size + lookahead, axis=1), signals
        )
        at = start + jnp.arange(size + lookahead, dtype=jnp.int32)
        written = ((at >= first) & (at < complete)).astype(signals.gate.dtype)
        return waiting_chunk(part, size, lookahead, targets, make_chunk, written[None])

    blocks = ChunkBlocks(block_of, -(-complete // size), -(-room // size))
    memory = write_blocks(memory, blocks)
    complete = _wait_for_write(complete, memory)

    def keep_last(x: jax.Array) -> jax.Array:
        last = jax.lax.dynamic_slice_in_dim(x, complete, lookahead, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(x, last, 0, axis=1)

    return memory, Pending(jax.tree.map(keep_last, signals), jnp.minimum(num_waiting, lookahead))


def _wait_for_write(number: jax.Array, memory: Memory) -> jax.Array:
    """The number, computed after the write: without that order XLA copies the queue."""
    first = jax.tree.leaves(memory)[-1].ravel()[0]
    return jnp.where((first > 0) & (first < 0), 0, number)
