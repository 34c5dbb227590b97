"""LaCT's fast networks over whole sequences, and token by token with the same results.

Chunks count each sequence's own real tokens, so sequences of a batch write at different times.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.chunks import map_groups, merge_groups
from fwpkm_jax.core.streams.queue import Pending, init_pending, push
from fwpkm_jax.rules.gradient import GradientChunk
from fwpkm_jax.rules.lact import LaCTMemory, LaCTRule


class FastTokens(NamedTuple):
    """What the fast networks are told about each token; real tokens come first.

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
      waiting: a queue per sequence, with room for a chunk.
    """

    memory: LaCTMemory
    waiting: Pending

    @classmethod
    def start(cls, memory: LaCTMemory, *, chunk_size: int) -> "FastStream":
        """No tokens seen, weights as given."""
        batch, heads, _, key = memory.weights.gate.shape
        value = memory.weights.down.shape[2]
        dtype = memory.weights.gate.dtype

        def zeros(*rest: int) -> jax.Array:
            return jnp.zeros((batch, 1, 1, *rest), dtype)

        one = FastTokens(
            *(zeros(heads, key), zeros(heads, key), zeros(heads, value)),
            *(zeros(heads, 3), zeros(heads), zeros()),
        )
        return cls(memory, init_pending(one, chunk_size))

    def push(self, rule: LaCTRule, tokens: FastTokens) -> tuple[Reads, "FastStream"]:
        """Reads a piece of a stream and writes the chunks that it completes."""

        def read(memory: LaCTMemory, tokens: FastTokens) -> jax.Array:
            query = tokens.query[:, 0].swapaxes(1, 2)[:, :, :, None]
            return jax.vmap(jax.vmap(rule.read))(memory, query).swapaxes(1, 2)[:, None]

        def write(memory: LaCTMemory, tokens: FastTokens) -> LaCTMemory:
            chunk = _chunk(jax.tree.map(lambda x: x[:, 0], tokens))
            step = jax.vmap(jax.vmap(lambda memory, chunk: rule.step(memory, chunk).memory))
            return step(memory, chunk)

        memory, waiting, reads = push(
            *(read, write, self.memory, self.waiting),
            jax.tree.map(lambda x: x[:, None], tokens),
            chunk_size=self.waiting.tokens.real.shape[2],
            num_real=jnp.sum(tokens.real, axis=1).astype(jnp.int32),
        )
        return reads[:, 0], FastStream(memory, waiting)


def _chunk(tokens: FastTokens) -> GradientChunk:
    """The tokens as the memory of each sequence and head takes them, `[batch, heads, length]`."""
    real = jnp.broadcast_to(tokens.real[:, None], tokens.momentum.swapaxes(1, 2).shape)
    query, key, value, rates = (x.swapaxes(1, 2) for x in tokens[:4])
    return GradientChunk(
        *(query[:, :, :, None], value, real, real, real),
        key=key[:, :, :, None],
        rates=rates,
        momentum=tokens.momentum.swapaxes(1, 2),
    )
