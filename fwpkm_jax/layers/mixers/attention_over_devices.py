"""Attention over sequences that lie over several devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fwpkm_jax.core.attention.cached import RingCache, put_in_ring
from fwpkm_jax.core.padding import pack_all, pack_tokens
from fwpkm_jax.core.sequence.axis import Places, SequenceAxis, places_of_part
from fwpkm_jax.core.sequence.ring import Keys, attention_around
from fwpkm_jax.layers.mixers.base import Mask, Starts
from fwpkm_jax.layers.mixers.window_cache import AttentionCache, attend_window, cache_before_part
from fwpkm_jax.layers.partition import BATCH, HEADS, Partition

Cache = AttentionCache | RingCache
"""Of sliding-window and of full attention."""


def places_over_devices(
    partition: Partition,
    shape: tuple[int, ...],
    *,
    mask: Mask,
    starts: Starts,
    first: jax.Array | None,
) -> Places:
    """Where tokens `[batch, length]` stand in their sequences, each device with its own part."""
    axis = partition.sequence
    assert axis is not None
    part = (shape[0] // partition.size(*BATCH), shape[1] // axis.size)
    tokens = partition.tokens()
    return partition.run(
        lambda mask, starts, first: places_of_part(
            starts, axis=axis, shape=part, first=first, mask=mask
        ),
        in_specs=(tokens, tokens, P(BATCH)),
        out_specs=tokens,
    )(mask, starts, first)


def attend_over_devices(
    partition: Partition,
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    at: Places,
    *,
    window: int | None,
    cache: Cache | None,
    mask: Mask,
) -> tuple[Float[Array, "batch length heads head"], Cache | None]:
    """`attend_part` on every device of a partition, each with its own heads."""
    axis = partition.sequence
    assert axis is not None
    tokens, by_head = partition.tokens(), partition.tokens(HEADS)

    def attend(query, key, value, at, cache, mask):
        options: dict[str, Any] = {"axis": axis, "window": window, "cache": cache, "mask": mask}
        return attend_part(query, key, value, at, **options)

    in_cache: Any = None
    if cache is not None:
        heads: Any = P(BATCH, None, HEADS)
        of_rows: Any = P(BATCH)
        in_cache = type(cache)(heads, heads, of_rows, of_rows)
    return partition.run(
        attend,
        in_specs=(by_head, by_head, by_head, tokens, in_cache, tokens),
        out_specs=(by_head, in_cache),
    )(query, key, value, at, cache, mask)


def attend_part(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    at: Places,
    *,
    axis: SequenceAxis,
    window: int | None,
    cache: Cache | None = None,
    mask: Mask = None,
) -> tuple[Float[Array, "batch length heads head"], Cache | None]:
    """Attention of this device's part of each sequence, inside `jax.shard_map`.

    Args:
      query: of this device's tokens.
      key: of this device's tokens.
      value: of this device's tokens.
      at: where these tokens stand in the sequence.
      axis: over which the sequence lies.
      window: tokens a query sees; None for all before it.
      cache: of the tokens before the whole sequence, equal on all devices.
      mask: of this device's tokens, 0 at padding.

    Returns:
      The heads' output before the gate, and on every device the cache after the last part,
      None if none was given.
    """
    if window is not None:
        return _attend_window_part(query, key, value, at, axis, window, cache, mask)
    own, first = Keys(key, value, *at), None
    if isinstance(cache, RingCache):
        before = None if at.numbers is None else jnp.zeros_like(cache.positions)
        cached = (cache.keys.astype(key.dtype), cache.values.astype(value.dtype))
        first = Keys(*cached, cache.positions, before)
    capacity = None if cache is None else cache.keys.shape[1]
    output = attention_around(query, own, axis=axis, window=capacity, first=first)
    if isinstance(cache, RingCache):
        # The cache holds the keys of all tokens, so that every device needs them all.
        key, value, positions, documents = jax.tree.map(
            lambda x: jax.lax.all_gather(x, axis.name, axis=1, tiled=True), own
        )
        new = {"positions": positions, "documents": documents}
        cache = put_in_ring(cache, key, value, after=output[:, :1], **new)
    return output, cache


def _attend_window_part(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    at: Places,
    axis: SequenceAxis,
    window: int,
    cache: Any,
    mask: Mask,
) -> tuple[jax.Array, AttentionCache | None]:
    """`attend_part` over a window: the tokens before the part, as a cache of theirs."""
    start, counts, packing = cache, None, None
    if mask is not None:  # Real tokens first, so that a window is of neighbours.
        packing = pack_tokens(mask)
        counts = packing.counts
        query, key, value, at = pack_all((query, key, value, at), packing)
        if at.numbers is not None:  # Padding goes with the last document.
            at = at._replace(numbers=jax.lax.cummax(at.numbers, axis=1))
    if start is None:
        empty = jnp.zeros((key.shape[0], window, *key.shape[2:]), key.dtype)
        positions = jnp.full((key.shape[0], window), -1, jnp.int32)
        nowhere = jnp.zeros_like(positions[:, 0])
        start = AttentionCache(empty, empty.astype(value.dtype), positions, nowhere)
    before, documents = cache_before_part(key, value, at, axis=axis, cache=start, counts=counts)
    output, end = attend_window(
        query, key, value, at.positions, before, counts, documents=documents
    )
    if packing is not None:
        places = packing.places[:, :, None, None]
        output = jnp.take_along_axis(output, places, axis=1)
    if cache is None:
        return output, None
    end = jax.tree.map(lambda x, like: x.astype(like.dtype), end, cache)
    return output, axis.from_last(end)
