"""One write of a very long chunk, a block of its tokens at a time.

A chunk of 100,000 tokens, a whole text, is still one write: every token reads the memory from
before the write. The rows, scores and coefficients of such a chunk would take gigabytes. Here only
one error per token is kept, and the tables are updated in place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fwpkm_jax.core.array_types import Queries, SubKeys, TokenValues
from fwpkm_jax.core.chunks import AnyChunk, Memory
from fwpkm_jax.core.slots.keys.addressing import Address
from fwpkm_jax.core.slots.options.overlay import AnyTable, close_rows, open_rows
from fwpkm_jax.core.slots.values.exchange import RowOps
from fwpkm_jax.core.slots.values.grouping import group_slots
from fwpkm_jax.core.slots.write import KeyWrite, SlotAccess, SubKeyUsage, ValueWrite, sub_key_usage


class ChunkBlocks(NamedTuple):
    """One chunk as blocks of tokens, made when they are asked for.

    Attributes:
      block: from a number to that block, a rule's chunk with leaves `[tokens, ...]`. Tokens that
        are no part of the chunk have weight 0 in everything.
      number: how many blocks there are.
      most: bound on `number` known when compiling.
    """

    block: Callable[[jax.Array], Any]
    number: Int[Array, ""]
    most: int

    def whole(self) -> AnyChunk:
        """The chunk at once, leaves `[most * tokens, ...]`."""
        blocks = jax.vmap(self.block)(jnp.arange(self.most, dtype=jnp.int32))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), blocks)

    def fold(self, function: Callable[[jax.Array, Any], Any], start: Any) -> Any:
        """`function(number, carry)` over the blocks in order, from the carry `start`."""
        return jax.lax.fori_loop(jnp.int32(0), self.number, function, start)


def write_whole(
    write: Callable[[Memory, AnyChunk], Memory], memory: Memory, blocks: ChunkBlocks
) -> Memory:
    """The memory after `write` of the whole chunk; unchanged if there are no blocks."""
    return jax.lax.cond(
        blocks.number > 0,
        lambda memory: write(memory, blocks.whole()),
        lambda memory: memory,
        memory,
    )


class _Addressed(NamedTuple):
    """Addresses and errors of all blocks; the leading axis `most` numbers the blocks."""

    usage: SubKeyUsage
    counts: jax.Array  # [slots], reads of each slot
    address: Address
    weights: jax.Array  # [most, tokens, places]
    errors: jax.Array  # [most, tokens, value]


def write_in_blocks(
    keys: SubKeys,
    values: AnyTable,
    blocks: ChunkBlocks,
    *,
    select: Callable[[SubKeys, Queries], tuple[Address, SlotAccess]],
    read: Callable[[AnyTable, jax.Array, jax.Array], TokenValues],
    key_write: KeyWrite,
    value_write: ValueWrite,
    ops: RowOps,
) -> tuple[SubKeys, AnyTable]:
    """Keys and values after one write of a chunk: its plain write, up to the order of sums.

    Args:
      keys: before the write.
      values: before the write, `[slots, value]`.
      blocks: the chunk, in the dtype of keys and values.
      select: from keys and queries to addresses and the slots read.
      read: from values, slots and weights `[tokens, places]` to what is read.
      ops: what adds rows.
    """
    num_subkeys = keys.shape[2]

    def address_block(number: jax.Array, addressed: _Addressed) -> _Addressed:
        chunk = blocks.block(number)
        address, (slot_ids, weights) = select(keys, chunk.query)
        output = read(values, slot_ids, weights)
        errors = value_write.error(output, chunk.target, chunk.error_weight[:, None])
        counted = jnp.broadcast_to(chunk.counted[:, None], slot_ids.shape)
        usage = sub_key_usage(address, num_subkeys=num_subkeys, token_weights=chunk.addressed)
        kept = (addressed.address, addressed.weights, addressed.errors)
        kept = jax.tree.map(
            lambda all_, x: all_.at[number].set(x), kept, (address, weights, errors)
        )
        return _Addressed(
            jax.tree.map(jnp.add, addressed.usage, usage),
            addressed.counts.at[slot_ids].add(counted, mode="promise_in_bounds"),
            *kept,
        )

    # First all blocks are read: a write between them would change what later ones read.
    addressed = blocks.fold(address_block, _none_addressed(keys, values, blocks, select))

    def write(number: jax.Array, carry: tuple[SubKeys, AnyTable]) -> tuple[SubKeys, AnyTable]:
        gradient, values = carry
        chunk = blocks.block(number)
        address, weights, errors = jax.tree.map(
            lambda x: x[number], (addressed.address, addressed.weights, addressed.errors)
        )
        gradient = gradient + key_write.gradient(
            keys, chunk.query, address, token_weights=chunk.addressed, usage=addressed.usage
        )
        slot_ids = address.slot_ids.reshape(weights.shape)
        counts = addressed.counts.at[slot_ids].get(mode="promise_in_bounds")
        steps = value_write.steps(weights, counts)
        opened = open_rows(values, slot_ids, chunk.counted)
        groups = group_slots(opened.slot_ids, num_slots=opened.rows.shape[0])
        rows = ops.add(opened.rows, groups, steps, errors)
        return gradient, close_rows(opened.values, rows)

    gradient, values = blocks.fold(write, (jnp.zeros_like(keys), values))
    return key_write.step(keys, gradient), values


def _none_addressed(keys, values, blocks: ChunkBlocks, select) -> _Addressed:
    """Zeros of the right shapes."""
    query = jax.eval_shape(blocks.block, jnp.int32(0)).query
    address, (_, weights) = jax.eval_shape(select, keys, query)

    def per_block(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.zeros((blocks.most, *shape), dtype)

    dtype = values.dtype
    return _Addressed(
        SubKeyUsage(jnp.zeros((2, keys.shape[2]), dtype), jnp.zeros((), dtype)),
        jnp.zeros((values.shape[0],), dtype),
        jax.tree.map(lambda x: per_block(x.shape, x.dtype), address),
        per_block(weights.shape, weights.dtype),
        per_block((weights.shape[0], values.shape[1]), dtype),
    )
