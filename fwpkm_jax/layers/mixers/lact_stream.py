"""LaCT's fast networks over whole sequences, and token by token with the same results.

Chunks count each sequence's own real tokens, so sequences of a batch write at different times.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.chunks import map_groups, merge_groups
from fwpkm_jax.core.streams.cuts import select
from fwpkm_jax.core.streams.documents import UnitSize, in_documents
from fwpkm_jax.core.streams.pending import Pending, init_pending
from fwpkm_jax.core.streams.queue import push
from fwpkm_jax.rules.gradient import GradientChunk
from fwpkm_jax.rules.lact import LaCTMemory, LaCTRule


class FastTokens(NamedTuple):
    """The inputs of the fast networks for each token; real tokens come first.

    Attributes:
      query, key, value: `[batch, length, heads, width]`; in a queue, with an axis of 1 behind
        the batch, as all leaves then have.
      rates: step sizes of gate, down and up matrix.
      momentum: share of the last step kept, averaged over the chunk.
      real: 1 for real tokens, 0 for padding.
    """

    query: Float[Array, "*batch length heads width"]
    key: Float[Array, "*batch length heads width"]
    value: Float[Array, "*batch length heads width"]
    rates: Float[Array, "*batch length heads 3"]
    momentum: Float[Array, "*batch length heads"]
    real: Float[Array, "*batch length"]


Reads = Float[Array, "batch length heads width"]


def read_whole(rule: LaCTRule, memory: LaCTMemory, tokens: FastTokens, *, chunk_size: int) -> Reads:
    """Reads whole sequences and writes after each chunk but the last, whose write is never read.

    Args:
      rule: of one network.
      memory: leaves `[batch, heads, ...]`.
      tokens: of the sequences from their first token.
    """
    batch, length, heads = tokens.query.shape[:3]
    # The last chunk's write would be read by no token.
    written = (length - 1) // chunk_size * chunk_size
    sequence = _chunk(tokens)  # Leaves [batch, heads, length, ...]
    memory, sequence = jax.tree.map(merge_groups, (memory, sequence))
    reads = []
    if written:
        # A group per sequence and head, each with a single sequence.
        first = jax.tree.map(lambda x: x[:, None, :written], sequence)
        out = map_groups(
            lambda memory, part: rule.run(memory, part, chunk_size=chunk_size), memory, first
        )
        memory = out.memory
        reads.append(out.output[:, 0])
    # The rest is read by the weights of the last write.
    reads.append(jax.vmap(rule.read)(memory, sequence.query[:, written:]))
    return jnp.concatenate(reads, axis=1).reshape(batch, heads, length, -1).swapaxes(1, 2)


def read_documents(
    rule: LaCTRule,
    memory: LaCTMemory,
    tokens: FastTokens,
    starts: Bool[Array, "batch length"],
    *,
    chunk_size: int,
) -> Reads:
    """`read_whole` of rows of several documents, each from the same memory.

    Args:
      rule: of one network.
      memory: leaves `[batch, heads, ...]`.
      tokens: of the rows, real tokens first.
      chunk_size: tokens of a document between two writes.
    """

    def within(
        memory: LaCTMemory, piece: FastTokens, count: jax.Array
    ) -> tuple[LaCTMemory, jax.Array]:
        # Only whole chunks are written; a document's last one is read and dropped.
        full = count == chunk_size

        def write() -> LaCTMemory:
            return select(full, _write(rule, memory, piece), memory)

        return jax.lax.cond(jnp.any(full), write, lambda: memory), _read(rule, memory, piece)

    _, reads = in_documents(
        within,
        memory,
        memory,
        jax.tree.map(lambda x: x[:, None], tokens),
        count=jnp.sum(tokens.real, axis=1).astype(jnp.int32),
        starts=starts,
        unit=UnitSize(chunk_size),
        alone=lambda tokens: _read(rule, memory, tokens),
    )
    return reads[:, 0]


class FastStream(NamedTuple):
    """Fast networks along a stream, and the tokens of each sequence's unfinished chunk.

    Attributes:
      memory: leaves `[batch, heads, ...]`.
      waiting: a queue per sequence, with room for a chunk.
    """

    memory: LaCTMemory
    waiting: Pending

    @classmethod
    def start(cls, memory: LaCTMemory, *, chunk_size: int) -> "FastStream":
        """The start of a stream with these weights and no waiting tokens."""
        batch, heads, _, key = memory.weights.gate.shape
        value = memory.weights.down.shape[2]
        dtype = memory.weights.gate.dtype

        def zeros(*rest: int) -> jax.Array:
            return jnp.zeros((batch, 1, 1, *rest), dtype)

        one = FastTokens(
            zeros(heads, key),
            zeros(heads, key),
            zeros(heads, value),
            zeros(heads, 3),
            zeros(heads),
            zeros(),
        )
        return cls(memory, init_pending(one, chunk_size))

    def push(
        self,
        rule: LaCTRule,
        tokens: FastTokens,
        *,
        fresh: LaCTMemory | None = None,
        starts: Bool[Array, "batch length"] | None = None,
    ) -> tuple[Reads, "FastStream"]:
        """Reads a piece of a stream and writes the chunks that it completes.

        Args:
          rule: of one network.
          tokens: the piece, real tokens first.
          fresh: with `starts`, the memory that documents start from.
          starts: first tokens of documents; None: the stream's document goes on.
        """
        chunk_size = self.waiting.tokens.real.shape[2]

        def add(
            stream: "FastStream", piece: FastTokens, count: jax.Array
        ) -> tuple["FastStream", jax.Array]:
            memory, waiting, reads = push(
                functools.partial(_read, rule),
                functools.partial(_write, rule),
                stream.memory,
                stream.waiting,
                piece,
                chunk_size=chunk_size,
                num_real=count,
                differentiable=True,
            )
            return FastStream(memory, waiting), reads

        # Sequences of a batch complete their chunks at different calls.
        count = jnp.sum(tokens.real, axis=1).astype(jnp.int32)
        members = jax.tree.map(lambda x: x[:, None], tokens)
        if starts is None or fresh is None:
            stream, reads = add(self, members, count)
        else:
            stream, reads = in_documents(
                add,
                self,
                FastStream.start(fresh, chunk_size=chunk_size),
                members,
                count=count,
                starts=starts,
                unit=UnitSize(chunk_size),
                position=self.waiting.num_waiting,
                alone=lambda tokens: _read(rule, fresh, tokens),
            )
        return reads[:, 0], stream


def _read(rule: LaCTRule, memory: LaCTMemory, tokens: FastTokens) -> jax.Array:
    """What tokens `[batch, 1, length, ...]` read."""
    query = tokens.query[:, 0].swapaxes(1, 2)[:, :, :, None]
    return jax.vmap(jax.vmap(rule.read))(memory, query).swapaxes(1, 2)[:, None]


def _write(rule: LaCTRule, memory: LaCTMemory, tokens: FastTokens) -> LaCTMemory:
    """The memories after tokens `[batch, 1, length, ...]` as one chunk."""
    chunk = _chunk(jax.tree.map(lambda x: x[:, 0], tokens))
    step = jax.vmap(jax.vmap(lambda memory, chunk: rule.step(memory, chunk).memory))
    return step(memory, chunk)


def _chunk(tokens: FastTokens) -> GradientChunk:
    """The tokens as chunks of each sequence and head, leaves `[batch, heads, length, ...]`."""
    real = jnp.broadcast_to(tokens.real[:, None], tokens.momentum.swapaxes(1, 2).shape)
    query, key, value, rates = (x.swapaxes(1, 2) for x in tokens[:4])
    return GradientChunk(
        query[:, :, :, None],
        value,
        real,
        real,
        real,
        key=key[:, :, :, None],
        rates=rates,
        momentum=tokens.momentum.swapaxes(1, 2),
    )
