"""Softmax attention of new tokens to a long cache and to each other; updates the cache in place.

A cache of 170,000 tokens is neither copied for a piece of the stream nor scored all at once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.attention.running_softmax import Sums, add_keys, no_keys
from fwpkm_jax.core.numerics import compute_dtype

_SCORES = 2**23  # Scores formed at a time.


class RingCache(NamedTuple):
    """Keys and values of the latest tokens; position p is stored at entry `p % capacity`.

    Attributes:
      keys: `[batch, capacity, kv_heads, head]`.
      values: `[batch, capacity, kv_heads, head]`.
      positions: -1 marks an empty entry.
      next_position: of each sequence's next token.
    """

    keys: Float[Array, "batch capacity kv_heads head"]
    values: Float[Array, "batch capacity kv_heads head"]
    positions: Int[Array, "batch capacity"]
    next_position: Int[Array, " batch"]


def larger_ring(cache: RingCache, capacity: int) -> RingCache:
    """The cache with room for `capacity` tokens, which is at least what it has."""
    batch = cache.positions.shape[0]
    places = jnp.where(cache.positions >= 0, cache.positions % capacity, capacity)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def put(x: jax.Array, empty: int) -> jax.Array:
        larger = jnp.full((batch, capacity, *x.shape[2:]), empty, x.dtype)
        return larger.at[rows, places].set(x, mode="drop")

    return RingCache(
        put(cache.keys, 0), put(cache.values, 0), put(cache.positions, -1), cache.next_position
    )


def ring_attention(
    query: Float[Array, "batch queries heads head"],
    key: Float[Array, "batch queries kv_heads head"],
    value: Float[Array, "batch queries kv_heads head"],
    cache: RingCache,
    *,
    positions: Int[Array, "batch queries"],
    documents: Int[Array, "batch queries"] | None = None,
    max_scores: int = _SCORES,
) -> Float[Array, "batch queries heads head"]:
    """`masked_attention` to the cached and the new tokens, `capacity` positions back.

    Args:
      query: of the new tokens, as in `masked_attention`.
      key: of the new tokens.
      value: of the new tokens.
      cache: of the tokens before.
      positions: of the new tokens; -1 for padding, which no token sees.
      documents: number of documents that have started in this piece up to each token; 0: the
        token belongs to the cache's document. None: all tokens do.
      max_scores: most scores formed at a time; at least those of one key are.
    """
    batch, queries, heads, head = query.shape
    capacity, kv_heads = cache.keys.shape[1:3]
    dtype = compute_dtype(query.dtype, key.dtype)
    shape = (batch, kv_heads, heads // kv_heads, queries)
    query = query.reshape(batch, queries, kv_heads, heads // kv_heads, head)
    sums = no_keys(shape, head=head, dtype=dtype)

    def add(sums: Sums, keys: jax.Array, values: jax.Array, key_positions, numbers) -> Sums:
        scores = jnp.einsum(
            "bqhrd,bkhd->bhrqk", query, keys.astype(key.dtype), preferred_element_type=dtype
        )
        at, key_at = positions[:, :, None], key_positions[:, None, :]
        # Entries older than the ring are still in it until they are overwritten.
        seen = (key_at >= 0) & (key_at <= at) & (key_at > at - capacity)
        if documents is not None:
            seen &= documents[:, :, None] == numbers[:, None, :]
        seen = seen[:, None, None]
        return add_keys(sums, scores * head**-0.5, seen, values.astype(value.dtype))

    def add_blocks(sums: Sums, keys, values, key_positions, numbers, filled) -> Sums:
        """Adds the first `filled` keys, a block at a time."""
        length = keys.shape[1]
        block = min(length, max(1, max_scores // (batch * heads * queries)))
        if block == length:
            return add(sums, keys, values, key_positions, numbers)

        def add_block(number: jax.Array, sums: Sums) -> Sums:
            # The last block may start earlier; keys that are already added are then hidden.
            first = number * block
            start = jnp.minimum(first, length - block)
            part = [
                jax.lax.dynamic_slice_in_dim(x, start, block, 1)
                for x in (keys, values, key_positions, numbers)
            ]
            fresh = start + jnp.arange(block, dtype=jnp.int32)[None] >= first
            return add(sums, part[0], part[1], jnp.where(fresh, part[2], -1), part[3])

        return jax.lax.fori_loop(jnp.int32(0), -(-filled // block), add_block, sums)

    filled = jnp.minimum(jnp.max(cache.next_position), capacity)
    before = jnp.zeros_like(cache.positions)  # All cached keys are of document 0.
    sums = add_blocks(sums, cache.keys, cache.values, cache.positions, before, filled)
    own = jnp.zeros_like(positions) if documents is None else documents
    sums = add_blocks(sums, key, value, positions, own, jnp.int32(queries))
    return jnp.moveaxis(sums.mean, 3, 1).reshape(batch, queries, heads, head).astype(value.dtype)


def put_in_ring(
    cache: RingCache,
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    *,
    positions: Int[Array, "batch length"],
    after: Float[Array, "batch read heads head"],
    documents: Int[Array, "batch length"] | None = None,
) -> RingCache:
    """The cache with the new tokens in place of the oldest; a donated cache is changed in place.

    Args:
      cache: of the tokens before.
      key: of the new tokens, in order.
      value: of the new tokens, in order.
      positions: of the new tokens; -1 for padding, which is not kept.
      after: the output read from the old cache; the update waits for it, else XLA copies the cache.
      documents: as in `ring_attention`; only tokens of the last document are kept.
    """
    batch, capacity = cache.positions.shape
    if documents is not None:
        last = jnp.max(documents, axis=1)
        positions = jnp.where(documents == last[:, None], positions, -1)
        goes_on = last == 0
        cache = cache._replace(
            positions=jnp.where(goes_on[:, None], cache.positions, -1),
            next_position=jnp.where(goes_on, cache.next_position, 0),
        )
    end = jnp.maximum(cache.next_position, jnp.max(positions, axis=1) + 1)
    # Of a piece longer than the cache only the end is kept, so that no place is set twice.
    is_stored = (positions >= 0) & (positions >= end[:, None] - capacity)
    places = jnp.where(is_stored, positions % capacity, capacity)
    # A condition that never holds makes the places wait for the read, which then comes first.
    first = after[:, :, 0, 0]
    places = jnp.where((first > 0) & (first < 0), capacity, places)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[rows, places].set(new.astype(old.dtype), mode="drop")

    return RingCache(
        put(cache.keys, key), put(cache.values, value), put(cache.positions, positions), end
    )
