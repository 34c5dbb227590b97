"""The write of all tokens that wait, as one chunk however long."""

from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.core.chunks import AnyChunk, Memory, map_memories
from fwpkm_jax.core.slots.options.blocks import ChunkBlocks
from fwpkm_jax.core.streams.pending import Pending
from fwpkm_jax.core.streams.queue import computed_after
from fwpkm_jax.core.streams.streaming import waiting_chunk

_BLOCK = 1024  # Tokens of a sequence that a flush forms at a time.


def flush(
    rule: Any, memory: Memory, pending: Pending, *, block: int = _BLOCK
) -> tuple[Memory, Pending]:
    """Writes the complete pairs now, as one chunk, and keeps the last `lookahead` tokens.

    Does nothing while no more than `lookahead` tokens wait. Time and memory follow the tokens that
    wait, not the queue's capacity.

    Args:
      rule: a chunk rule, of which `write_blocks`, `targets`, `chunk` and `lookahead` are used.
      memory: leaves `[groups, ...]`.
      pending: tokens that wait.
      block: tokens of each sequence formed at a time.
    """

    lookahead = rule.lookahead

    def flush_group(memory: Memory, pending: Pending) -> tuple[Memory, Pending]:
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
            return waiting_chunk(rule, part, size, written[None])

        blocks = ChunkBlocks(block_of, -(-complete // size), -(-room // size))
        memory = rule.write_blocks(memory, blocks)
        # The queue changes after the write: without that order XLA copies it.
        complete = computed_after(jax.tree.leaves(memory)[-1].ravel()[:1], complete)

        def keep_last(x: jax.Array) -> jax.Array:
            last = jax.lax.dynamic_slice_in_dim(x, complete, lookahead, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x, last, 0, axis=1)

        kept = jax.tree.map(keep_last, signals)
        return memory, Pending(kept, jnp.minimum(num_waiting, lookahead))

    return map_memories(flush_group, memory, pending)
