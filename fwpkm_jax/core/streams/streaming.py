"""A stream of a rule's memories: the queue reads and writes through the rule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.chunks import AnyChunk, Memory, map_memories
from fwpkm_jax.core.streams import queue
from fwpkm_jax.core.streams.pending import ChunkSize, Pending, Signals
from fwpkm_jax.core.targets import WriteWeights, pair_weights, shift_left

Read = Callable[[Memory, jax.Array], tuple[jax.Array, Any]]


class StreamOutput(NamedTuple):
    """The result of a piece of a stream.

    Attributes:
      memory: leaves `[groups, ...]`.
      pending: tokens that wait.
      output: `[groups, members, length, value]`.
      access: what the rule reports about each token's read, leaves `[groups, members, length,
        ...]`.
    """

    memory: Memory
    pending: Pending
    output: jax.Array
    access: Any


def push(
    rule: Any,
    memory: Memory,
    pending: Pending,
    signals: Signals,
    *,
    chunk_size: ChunkSize,
    num_real: Int[Array, " groups"] | None = None,
    documents: queue.NewDocuments | None = None,
) -> StreamOutput:
    """`queue.push` for a rule: reads a piece and writes the chunks that it completes.

    A rule that `reads_own_writes` writes every token of the piece; none waits.

    Args:
      rule: a chunk rule, of which `read`, `write`, `targets`, `chunk` and `lookahead` are used, or
        `run_groups` and `chunk` of one that `reads_own_writes`.
      memory: leaves `[groups, ...]`.
      signals: the piece, leaves `[groups, members, length, ...]`.
      chunk_size: tokens per write, for this call, or "flush".
      num_real: tokens of the piece, its first ones; None: all.
      documents: as in `queue.push`.

    Raises:
      ValueError: a chunk and its lookahead do not fit the queue, or nothing can wait for a flush.
    """
    if rule.reads_own_writes:
        if chunk_size == "flush":
            raise ValueError(
                f"chunk_size='flush': {type(rule).__name__} writes each token at once, and none "
                "waits for a flush; leave chunk_size out."
            )
        memory, output, access = _write_at_once(rule, memory, signals, num_real, documents)
        return StreamOutput(memory, pending, output, access)

    def read_tokens(memory: Memory, signals: Signals) -> tuple[jax.Array, Any]:
        return read_sequences(rule.read, memory, signals.query)

    def write_waiting(memory: Memory, signals: Signals) -> Memory:
        def write_group(memory: Memory, signals: Signals) -> Memory:
            assert chunk_size != "flush", "tokens that wait for a flush are no chunk"
            return rule.write(memory, waiting_chunk(rule, signals, chunk_size))

        return map_memories(write_group, memory, signals)

    memory, pending, (output, access) = queue.push(
        read_tokens,
        write_waiting,
        memory,
        pending,
        signals,
        chunk_size=chunk_size,
        lookahead=rule.lookahead,
        num_real=num_real,
        documents=documents,
    )
    return StreamOutput(memory, pending, output, access)


def _write_at_once(
    rule: Any,
    memory: Memory,
    signals: Signals,
    num_real: Int[Array, " groups"] | None,
    documents: queue.NewDocuments | None,
) -> tuple[Memory, jax.Array, Any]:
    """The memory after a piece, and what its tokens read after their own writes."""
    length, real = signals.gate.shape[2], signals.mask != 0
    if num_real is not None:
        own = jnp.arange(length, dtype=jnp.int32)[None] < num_real[:, None]
        real = real & own[:, None]
        if documents is not None:  # Behind the last real token nothing starts.
            documents = documents._replace(starts=documents.starts & own)
    real = real.astype(signals.gate.dtype)
    weights = WriteWeights(signals.gate * real, jnp.ones_like(real), real)
    chunk = rule.chunk(signals.query, signals.value, weights)
    out = rule.run_groups(memory, chunk, chunk_size=length, documents=documents)
    return out.memory, out.output, out.access


def read_documents(
    read: Read,
    memory: Memory,
    pending: Pending,
    signals: Signals,
    documents: queue.NewDocuments,
    *,
    num_real: Int[Array, " groups"] | None = None,
) -> StreamOutput:
    """`push` that writes and queues nothing; documents that start still bring memory and queue."""
    length = signals.query.shape[2]
    count = jnp.full_like(pending.num_waiting, length) if num_real is None else num_real

    def read_tokens(memory: Memory, signals: Signals) -> tuple[jax.Array, Any]:
        return read_sequences(read, memory, signals.query)

    memory, pending, (output, access), _ = queue.without_writes(
        read_tokens, memory, pending, signals, documents, count=count
    )
    return StreamOutput(memory, pending, output, access)


def read_sequences(
    read: Read, memory: Memory, query: Float[Array, "groups members length heads key"]
) -> tuple[Float[Array, "groups members length value"], Any]:
    """A rule's `read` of each group's queries; results with the same leading axes."""

    def read_group(memory: Memory, query: jax.Array) -> tuple[jax.Array, Any]:
        members, length = query.shape[:2]
        out = read(memory, query.reshape(members * length, *query.shape[2:]))
        return jax.tree.map(lambda x: x.reshape(members, length, *x.shape[1:]), out)

    return map_memories(read_group, memory, query)


def waiting_chunk(
    rule: Any, signals: Signals, size: int, written: jax.Array | None = None
) -> AnyChunk:
    """A group's first `size` waiting tokens as one chunk.

    Args:
      rule: whose chunk it is.
      signals: of the tokens, those that hold their targets included; leaves `[members, ...]`.
      written: `[1, length]`, 1 for the tokens that the chunk is limited to; None: all.
    """

    def tokens(x: jax.Array) -> jax.Array:
        return x[:, :size].reshape(x.shape[0] * size, *x.shape[2:])

    mask = (signals.mask != 0).astype(signals.mask.dtype)
    same = signals.mask == shift_left(signals.mask, rule.lookahead)
    # All targets are known by now; they may stand behind the written tokens.
    known = jnp.ones_like(mask) if written is None else jnp.ones_like(mask) * written
    weights = pair_weights(signals.gate, mask, known=known, lookahead=rule.lookahead)
    weights = weights._replace(write=weights.write * same.astype(mask.dtype))
    if written is not None:
        weights = weights._replace(counted=mask * written)
    query, target = tokens(signals.query), tokens(rule.targets(signals.value))
    return rule.chunk(query, target, WriteWeights(*map(tokens, weights)))
