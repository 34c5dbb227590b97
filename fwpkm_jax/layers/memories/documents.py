"""How a memory layer reads and writes rows that hold several documents."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.chunks import AnyChunk, Memory, map_groups
from fwpkm_jax.core.documents import document_positions, same_document
from fwpkm_jax.core.streams.documents import in_documents
from fwpkm_jax.core.streams.streaming import Signals, read_sequences
from fwpkm_jax.core.targets import Pairing
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


def within_documents(
    sequence: AnyChunk, starts: Bool[Array, "batch length"], *, lookahead: int
) -> AnyChunk:
    """The sequence without the pairs of tokens that belong to different documents."""
    same = same_document(starts.astype(bool), later=lookahead).astype(sequence.write_weight.dtype)
    return sequence._replace(
        write_weight=sequence.write_weight * same, paired=sequence.paired * same
    )


def run_documents(
    rule: AbstractChunkRule,
    memory: Memory,
    signals: Signals,
    starts: Bool[Array, "batch length"],
    mask: Float[Array, "batch length"] | None,
    *,
    chunk_size: int,
    pairing: Pairing,
) -> DocumentRun:
    """Reads and writes rows whose documents each start from the memory as it comes in.

    Chunks count from each document's first token. A document shorter than a chunk only reads,
    unless it is the last of its row: no later token would read its write.

    Args:
      rule: of one memory.
      memory: of each sequence, leaves `[batch, ...]`.
      signals: the inputs of the memory; `gate` weighs the losses.
      starts: first tokens of documents.
      mask: 1 for real tokens.
      chunk_size: tokens of a document between two writes.
      pairing: makes the write weights.
    """
    length = starts.shape[1]
    starts = starts.at[:, 0].set(True)
    ends = starts | (document_positions(starts) % chunk_size == 0)
    same = same_document(ends, later=rule.lookahead).astype(signals.gate.dtype)
    weights = pairing(signals.gate, mask, chunk_size=length, lookahead=rule.lookahead)
    weights = weights._replace(write=weights.write * same, paired=weights.paired * same)
    target = rule.targets(signals.value)
    at = jnp.arange(length, dtype=jnp.int32)[None]
    real = jnp.ones(starts.shape, bool) if mask is None else mask != 0
    tokens = jax.tree.map(lambda x: x[:, None], (signals.query, target, weights))

    def within(memory: Memory, piece: Any, count: jax.Array) -> tuple[Memory, Any]:
        query, target, weights = jax.tree.map(lambda x: x[:, 0], piece)
        own = jnp.arange(target.shape[1], dtype=jnp.int32)[None] < count[:, None]
        # Tokens of other units follow; they count as padding.
        weights = jax.tree.map(lambda x: jnp.where(own, x, 0), weights)

        def step(memory: Memory, query: jax.Array, target: jax.Array, weights: Any) -> Any:
            after, output, access, _ = rule.step(memory, rule.chunk(query, target, weights))
            return after, (output, access)

        memory, read = map_groups(step, memory, query, target, weights)
        return memory, jax.tree.map(lambda x: x[:, None], read)

    after, (read, access) = in_documents(
        *(within, memory, memory, tokens),
        count=jnp.max(jnp.where(real, at + 1, 0), axis=1),
        starts=starts,
        chunk=chunk_size,
        alone=lambda tokens: read_sequences(rule.read, memory, tokens[0]),
    )
    read, access = jax.tree.map(lambda x: x[:, 0], (read, access))
    losses = weights.write * jnp.mean((read - target) ** 2, axis=-1)
    return DocumentRun(after, read, access, losses, weights.paired)
