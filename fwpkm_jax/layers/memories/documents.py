"""How a memory layer reads and writes rows that hold several documents.

`core.streams.documents.in_documents` goes through the rows, as for all memories in chunks. Here is
what a memory layer gives it: pairs within documents, and with parts of a row on several devices the
open chunk of the device before.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.chunks import AnyChunk, Memory, map_memories
from fwpkm_jax.core.documents import document_numbers, document_positions, same_document
from fwpkm_jax.core.sequence.axis import SequenceAxis, positions_of_part
from fwpkm_jax.core.sequence.halo import halo_exchange
from fwpkm_jax.core.sequence.sequential import sequential_pass
from fwpkm_jax.core.streams.cuts import select
from fwpkm_jax.core.streams.documents import UnitSize, in_documents
from fwpkm_jax.core.streams.pending import NewDocuments, Signals
from fwpkm_jax.core.streams.streaming import read_sequences
from fwpkm_jax.core.targets import Pairing, shift_left
from fwpkm_jax.layers.partition import BATCH, Partition
from fwpkm_jax.rules import AbstractChunkRule


class DocumentRun(NamedTuple):
    """The result of rows whose documents each start from the same memory.

    Attributes:
      memory: of each sequence's last document, leaves `[batch, ...]`.
      read: by each token, `[batch, length, value]`.
      access: what the rule reports about the reads, leaves `[batch, length, ...]`, or None.
      losses: weighted mean squared error of each read, `[batch, length]`.
      paired: 1 where a token has a target in its chunk, `[batch, length]`.
    """

    memory: Memory
    read: Float[Array, "batch length value"]
    access: Any
    losses: Float[Array, "batch length"]
    paired: Float[Array, "batch length"]


class _Rows(NamedTuple):
    """What is read and written.

    Attributes:
      tokens: query, target and weights, leaves `[batch, length, ...]`.
      starts: first tokens of documents.
      position: of the first token in its document; a multiple of the chunk's size, or any number
        where it starts a document.
      num_tokens: of each row, its first ones.
      ends: whether the row ends here, so that its last chunk is written though it is not full;
        None: all do.
    """

    tokens: Any
    starts: Bool[Array, "batch length"]
    position: Int[Array, " batch"]
    num_tokens: Int[Array, " batch"]
    ends: Bool[Array, " batch"] | None


def within_documents(
    sequence: AnyChunk, starts: Bool[Array, "batch length"], *, lookahead: int
) -> AnyChunk:
    """The sequence without the pairs of tokens that belong to different documents."""
    same = same_document(starts.astype(bool), lookahead=lookahead).astype(
        sequence.write_weight.dtype
    )
    return sequence._replace(
        write_weight=sequence.write_weight * same, paired=sequence.paired * same
    )


def run_documents(
    rule: AbstractChunkRule,
    memory: Memory,
    signals: Signals,
    starts: Bool[Array, "batch length"],
    mask: TokenMask | None,
    *,
    chunk_size: int,
    pairing: Pairing,
    partition: Partition | None = None,
) -> DocumentRun:
    """Reads and writes rows whose documents each start from the memory as it comes in.

    Chunks count from each document's first token. A document shorter than a chunk only reads,
    unless it is the last of its row: no later token would read its write.

    Args:
      rule: of one memory.
      memory: of each sequence, leaves `[batch, ...]`.
      signals: the inputs of the memory; `gate` weighs the losses.
      mask: 1 for real tokens.
      chunk_size: tokens of a document between two writes.
      partition: of the rows over devices. Each reads and writes its own rows; where it holds a part
        of each row, it waits for the memory of the device before, see `_read_part`.
    """
    axis = None if partition is None else partition.sequence
    if rule.reads_own_writes:
        chunk_size = 1  # Each token is a write of its own, and no device waits for a chunk's rest.
    places: Any = functools.partial(_places, chunk_size=chunk_size, axis=axis)
    read: Any = functools.partial(_read_part, rule, chunk_size=chunk_size, axis=axis)
    if partition is not None:
        rows, of_rows = partition.tokens(), P(BATCH)
        places = partition.run(places, in_specs=rows, out_specs=rows)
        read = partition.run(read, in_specs=(of_rows, *[rows] * 4), out_specs=(of_rows, rows, rows))
    starts, positions, units = places(starts)
    same = units == shift_left(units, rule.lookahead)
    length = starts.shape[1]
    weights = pairing(signals.gate, mask, chunk_size=length, lookahead=rule.lookahead)
    same = same.astype(weights.write.dtype)
    weights = weights._replace(write=weights.write * same, paired=weights.paired * same)
    target = rule.targets(signals.value)
    real = jnp.ones(starts.shape, bool) if mask is None else mask != 0
    tokens = signals.query, target, weights
    memory, output, access = read(memory, tokens, starts, positions, real)
    losses = weights.write * jnp.mean((output - target) ** 2, axis=-1)
    return DocumentRun(memory, output, access, losses, weights.paired)


def _places(
    starts: Bool[Array, "batch length"], *, chunk_size: int, axis: SequenceAxis | None
) -> tuple[Bool[Array, "batch length"], Int[Array, "batch length"], Int[Array, "batch length"]]:
    """Starts of documents, positions in them and, from 1, the number of each token's chunk."""
    starts = starts.at[:, 0].set(True if axis is None else starts[:, 0] | (axis.index == 0))
    if axis is None:
        positions = document_positions(starts)
    else:
        positions = positions_of_part(starts, axis=axis, shape=starts.shape).positions
    units = document_numbers(starts | (positions % chunk_size == 0))
    if axis is not None:
        units = units + axis.sum_before(units[:, -1])[:, None]
    return starts, positions, units


def _read_part(
    rule: AbstractChunkRule,
    memory: Memory,
    tokens: Any,
    starts: Bool[Array, "batch length"],
    positions: Int[Array, "batch length"],
    real: Bool[Array, "batch length"],
    *,
    chunk_size: int,
    axis: SequenceAxis | None,
) -> tuple[Memory, jax.Array, Any]:
    """The memory after whole rows, and what the tokens of this device's part read.

    A chunk that lies over two devices is written by the second, which receives the tokens before
    its own, at most one less than a chunk. The memory itself goes from device to device
    (`core.sequence.sequential`), so that each has the whole of it.
    """
    length = starts.shape[1]
    at = jnp.arange(length, dtype=jnp.int32)[None]
    count = jnp.max(jnp.where(real, at + 1, 0), axis=1)
    if axis is None:
        whole = _Rows(tokens, starts, jnp.zeros_like(count), count, None)
        return _read_rows(rule, memory, memory, whole, chunk_size=chunk_size)

    begin = axis.index * length
    end = jax.lax.pmax(jnp.where(count > 0, begin + count, 0), axis.name)  # Of the row's tokens.
    count = jnp.clip(end - begin, 0, length)
    open_tokens = jnp.where((count > 0) & ~starts[:, 0], positions[:, 0] % chunk_size, 0)
    edge = chunk_size - 1
    none = jax.tree.map(lambda x: jnp.zeros((x.shape[0], edge, *x.shape[2:]), x.dtype), tokens)
    before = halo_exchange(tokens, none, axis=axis)
    tokens = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), before, tokens)
    # The open chunk's tokens come first.
    tokens = _moved(tokens, edge - open_tokens, length + edge)
    rows = _Rows(
        tokens,
        starts=_starts_behind(starts, open_tokens, length + edge),
        position=positions[:, 0] - open_tokens,
        num_tokens=open_tokens + count,
        ends=end <= begin + length,
    )

    def after(memory: Memory, inputs: tuple[Memory, _Rows]) -> Memory:
        return _read_rows(rule, memory, *inputs, chunk_size=chunk_size)[0]

    start = sequential_pass(after, memory, (memory, rows), axis=axis)
    last, output, access = _read_rows(rule, start, memory, rows, chunk_size=chunk_size)
    output, access = _moved((output, access), open_tokens, length)
    return axis.from_last(last), output, access


def _read_rows(
    rule: AbstractChunkRule, memory: Memory, fresh: Memory, rows: _Rows, *, chunk_size: int
) -> tuple[Memory, jax.Array, Any]:
    """The memory after the rows, and what each token reads, `[batch, length, ...]`.

    Args:
      rule: of one memory.
      memory: before the first token, leaves `[batch, ...]`.
      fresh: before each document, leaves `[batch, ...]`.
      chunk_size: tokens of a document between two writes.
    """
    if rule.reads_own_writes:
        length = rows.starts.shape[1]
        own = jnp.arange(length, dtype=jnp.int32)[None] < rows.num_tokens[:, None]
        documents = NewDocuments(rows.starts & own, fresh)  # Behind the last token nothing starts.
        chunk = rule.chunk(*jax.tree.map(lambda x: x[:, None], rows.tokens))
        run: Any = rule.run_groups  # Such a rule's takes documents.
        out = run(memory, chunk, chunk_size=length, documents=documents)
        return out.memory, *jax.tree.map(lambda x: x[:, 0], (out.output, out.access))

    def within(memory: Memory, piece: Any, count: jax.Array) -> tuple[Memory, Any]:
        query, target, weights = jax.tree.map(lambda x: x[:, 0], piece)
        own = jnp.arange(target.shape[1], dtype=jnp.int32)[None] < count[:, None]
        # Tokens of other units follow; they count as padding.
        weights = jax.tree.map(lambda x: jnp.where(own, x, 0), weights)

        def step(memory: Memory, query: jax.Array, target: jax.Array, weights: Any) -> Any:
            after, output, access, _ = rule.step(memory, rule.chunk(query, target, weights))
            return after, (output, access)

        after, read = map_memories(step, memory, query, target, weights)
        if rows.ends is not None:
            written = (count == chunk_size) | rows.ends
            after = select(written, after, memory)
        return after, jax.tree.map(lambda x: x[:, None], read)

    memory, read = in_documents(
        within,
        memory,
        fresh,
        jax.tree.map(lambda x: x[:, None], rows.tokens),
        count=rows.num_tokens,
        starts=rows.starts,
        unit=UnitSize(chunk_size),
        position=rows.position,
        alone=lambda tokens: read_sequences(rule.read, fresh, tokens[0]),
    )
    output, access = jax.tree.map(lambda x: x[:, 0], read)
    return memory, output, access


def _moved(tree: Any, by: Int[Array, " batch"], length: int) -> Any:
    """Leaves `[batch, length, ...]` from each row's place `by` on; the last token repeated."""
    at = by[:, None] + jnp.arange(length, dtype=by.dtype)[None]
    return jax.tree.map(
        lambda x: jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))(x, at), tree
    )


def _starts_behind(
    starts: Bool[Array, "batch length"], by: Int[Array, " batch"], length: int
) -> Bool[Array, "batch longer"]:
    """The starts, each row's `by` tokens further on in a row of this length."""
    at = jnp.arange(length, dtype=by.dtype)[None] - by[:, None]
    inside = (at >= 0) & (at < starts.shape[1])
    safe = jnp.clip(at, 0, starts.shape[1] - 1)
    return inside & jnp.take_along_axis(starts, safe, axis=1)
