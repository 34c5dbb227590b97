"""LaCT's fast networks over whole sequences, and token by token with the same results.

Chunks count each sequence's own real tokens, so sequences of a batch write at different times.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.chunks import map_groups, merge_groups
from fwpkm_jax.rules.lact import LaCTChunk, LaCTMemory, LaCTRule


class FastTokens(NamedTuple):
    """What the fast networks are told about each token; real tokens come first.

    Attributes:
      query, key, value: `[batch, length, heads, width]`.
      rates: step sizes of gate, down and up matrix.
      momentum: share of the last step kept, averaged over the chunk.
      real: 1 for real tokens, 0 for padding.
    """

    query: Float[Array, "batch length heads width"]
    key: Float[Array, "batch length heads width"]
    value: Float[Array, "batch length heads width"]
    rates: Float[Array, "batch length heads 3"]
    momentum: Float[Array, "batch length heads"]
    real: Float[Array, "batch length"]


Reads = Float[Array, "batch length heads width"]


def read_whole(rule: LaCTRule, memory: LaCTMemory, tokens: FastTokens, *, chunk_size: int) -> Reads:
    """Reads whole sequences, writing after each chunk; nothing reads a write of the last chunk.

    Args:
      rule: of one network.
      memory: leaves `[batch, heads, ...]`.
      tokens: of the sequences from their first token.
      chunk_size: tokens between two writes.
    """
    batch, length, heads = tokens.query.shape[:3]
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
    reads.append(jax.vmap(rule.read)(memory, sequence.query[:, written:]))
    return jnp.concatenate(reads, axis=1).reshape(batch, heads, length, -1).swapaxes(1, 2)


class FastStream(NamedTuple):
    """Fast networks along a stream, and the tokens of each sequence's unfinished chunk.

    Attributes:
      memory: leaves `[batch, heads, ...]`.
      waiting: leaves `[batch, chunk_size, ...]`; zeros behind the waiting tokens.
      num_waiting: tokens that wait, below chunk_size.
    """

    memory: LaCTMemory
    waiting: FastTokens
    num_waiting: Int[Array, " batch"]

    @classmethod
    def start(cls, memory: LaCTMemory, *, chunk_size: int) -> "FastStream":
        """No tokens seen, weights as given."""
        batch, heads, _, key = memory.weights.gate.shape
        value = memory.weights.down.shape[2]
        dtype = memory.weights.gate.dtype

        def zeros(*rest: int) -> jax.Array:
            return jnp.zeros((batch, chunk_size, *rest), dtype)

        waiting = FastTokens(
            *(zeros(heads, key), zeros(heads, key), zeros(heads, value)),
            *(zeros(heads, 3), zeros(heads), zeros()),
        )
        return cls(memory, waiting, jnp.zeros((batch,), jnp.int32))

    def push(self, rule: LaCTRule, tokens: FastTokens) -> tuple[Reads, "FastStream"]:
        """Reads a piece of a stream and writes the chunks that it completes."""
        chunk_size = self.waiting.real.shape[1]
        num_full, rest = divmod(tokens.real.shape[1], chunk_size)
        stream, reads = self, []
        if num_full:

            def split(x: jax.Array) -> jax.Array:
                x = x[:, : num_full * chunk_size]
                return x.reshape(x.shape[0], num_full, chunk_size, *x.shape[2:]).swapaxes(0, 1)

            def body(stream: FastStream, piece: FastTokens) -> tuple[FastStream, Reads]:
                out, stream = stream._push_piece(rule, piece)
                return stream, out

            stream, out = jax.lax.scan(body, stream, jax.tree.map(split, tokens))
            out = out.swapaxes(0, 1)
            reads.append(out.reshape(out.shape[0], num_full * chunk_size, *out.shape[3:]))
        if rest:
            last = jax.tree.map(lambda x: x[:, num_full * chunk_size :], tokens)
            out, stream = stream._push_piece(rule, last)
            reads.append(out)
        return jnp.concatenate(reads, axis=1), stream

    def _push_piece(self, rule: LaCTRule, piece: FastTokens) -> tuple[Reads, "FastStream"]:
        """`push` of at most `chunk_size` tokens, which complete at most one chunk."""
        chunk_size, length = self.waiting.real.shape[1], piece.real.shape[1]
        before = _read(rule, self.memory, piece.query)
        # Behind the real tokens stands nothing, so that streams with padding end up the same.
        piece = jax.tree.map(lambda x: x * _like(piece.real, x), piece)
        longer = jax.tree.map(
            lambda waiting, new: jax.vmap(_insert)(waiting, new, self.num_waiting),
            self.waiting,
            piece,
        )
        total = self.num_waiting + jnp.sum(piece.real, axis=1).astype(jnp.int32)
        complete = total >= chunk_size

        def keep() -> tuple[LaCTMemory, Reads, FastTokens]:
            return self.memory, before, jax.tree.map(lambda x: x[:, :chunk_size], longer)

        def write() -> tuple[LaCTMemory, Reads, FastTokens]:
            chunk = _chunk(jax.tree.map(lambda x: x[:, :chunk_size], longer))
            written = jax.vmap(jax.vmap(lambda memory, chunk: rule.step(memory, chunk).memory))(
                self.memory, chunk
            )
            memory = jax.tree.map(
                lambda new, old: jnp.where(_like(complete, new), new, old), written, self.memory
            )
            # Tokens behind the one that completed the chunk already see the write.
            position = self.num_waiting[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
            late = position >= chunk_size
            after = _read(rule, memory, piece.query)
            reads = jnp.where(_like(late, before), after, before)

            def behind(x: jax.Array) -> jax.Array:
                short = jnp.zeros((x.shape[0], chunk_size - length, *x.shape[2:]), x.dtype)
                rest = jnp.concatenate([x[:, chunk_size:], short], axis=1)
                return jnp.where(_like(complete, x), rest, x[:, :chunk_size])

            return memory, reads, jax.tree.map(behind, longer)

        memory, reads, waiting = jax.lax.cond(jnp.any(complete), write, keep)
        return reads, FastStream(memory, waiting, jnp.where(complete, total - chunk_size, total))


def _chunk(tokens: FastTokens) -> LaCTChunk:
    """The tokens as the memory of each sequence and head takes them, `[batch, heads, length]`."""
    real = jnp.broadcast_to(tokens.real[:, None], tokens.momentum.swapaxes(1, 2).shape)
    query, key, value, rates = (x.swapaxes(1, 2) for x in tokens[:4])
    return LaCTChunk(
        *(query[:, :, :, None], value, real, real, real),
        key=key[:, :, :, None],
        rates=rates,
        momentum=tokens.momentum.swapaxes(1, 2),
    )


def _read(rule: LaCTRule, memory: LaCTMemory, query: Reads) -> Reads:
    reads = jax.vmap(jax.vmap(rule.read))(memory, query.swapaxes(1, 2)[:, :, :, None])
    return reads.swapaxes(1, 2)


def _insert(waiting: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    """`[chunk_size + length, ...]`: the new rows behind the first `at` waiting ones."""
    longer = jnp.concatenate([waiting, jnp.zeros_like(new)])
    return jax.lax.dynamic_update_slice_in_dim(longer, new, at, axis=0)


def _like(flags: jax.Array, x: jax.Array) -> jax.Array:
    """The flags with trailing axes of 1, as many as `x` has more."""
    return flags.reshape(*flags.shape, *[1] * (x.ndim - flags.ndim))
