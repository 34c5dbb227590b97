"""How a memory layer reads and writes a piece of a stream, with padding and documents."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from fwpkm_jax.core.chunks import Memory
from fwpkm_jax.core.documents import pack_starts
from fwpkm_jax.core.padding import pack_tokens
from fwpkm_jax.core.streams import streaming
from fwpkm_jax.core.streams.flush import flush
from fwpkm_jax.core.streams.pending import ChunkSize, NewDocuments, Pending, Signals
from fwpkm_jax.layers.partition import BATCH, Partition
from fwpkm_jax.rules import AbstractChunkRule


def advance(
    rule: AbstractChunkRule,
    memory: Memory,
    pending: Pending,
    queued: Signals,
    *,
    documents: NewDocuments | None,
    chunk_size: ChunkSize,
    write: bool,
    has_padding: bool,
    partition: Partition | None,
) -> streaming.StreamOutput:
    """Reads a piece, and writes the chunks that it completes.

    Args:
      rule: of one memory.
      memory: leaves `[groups, ...]`.
      queued: the piece, leaves `[groups, members, length, ...]`; `mask` is the number of each
        token's document, 0 for padding.
      documents: where documents start from a memory of their own, `starts` `[groups, length]`;
        None: nowhere.
      write: False, with `documents`, only reads.
      has_padding: whether there may be any.
      partition: devices that each have whole sequences here; None: one.
    """

    def of_sequences(
        memory: Memory, pending: Pending, queued: Signals, documents: NewDocuments | None
    ) -> streaming.StreamOutput:
        # Only positions where every sequence of a memory has padding go behind.
        packing = pack_tokens(jnp.any(queued.mask != 0, axis=1)) if has_padding else None
        if packing is not None:
            queued = _reorder(queued, packing.order)
        if documents is not None:
            documents = documents._replace(starts=pack_starts(documents.starts, packing))
        num_real = None if packing is None else packing.counts
        if write:
            out = streaming.push(
                *(rule, memory, pending, queued),
                chunk_size=chunk_size,
                num_real=num_real,
                documents=documents,
            )
        else:
            assert documents is not None
            out = streaming.read_documents(
                rule.read, memory, pending, queued, documents, num_real=num_real
            )
        if packing is None:
            return out
        output, access = _reorder((out.output, out.access), packing.places)
        return out._replace(output=output, access=access)

    run: Any = of_sequences
    if partition is not None:
        run = partition.run(run, in_specs=P(BATCH), out_specs=P(BATCH))
    return run(memory, pending, queued, documents)


def write_waiting(
    rule: AbstractChunkRule, memory: Memory, pending: Pending, *, partition: Partition | None
) -> tuple[Memory, Pending]:
    """Writes the complete pairs that wait, see `core.streams.flush.flush`."""
    run = functools.partial(flush, rule)
    if partition is not None:
        run = partition.run(run, in_specs=P(BATCH), out_specs=P(BATCH))
    return run(memory, pending)


def _reorder(tree: Any, order: Int[Array, "groups length"]) -> Any:
    """Leaves `[groups, members, length, ...]` with each group's positions in the given order."""

    def reorder(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, jnp.expand_dims(order, (1, *range(3, x.ndim))), axis=2)

    return jax.tree.map(reorder, tree)
