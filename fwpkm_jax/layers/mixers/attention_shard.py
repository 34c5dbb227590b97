"""Attention of a shard of each sequence, where a sequence lies over several devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.attention.cached import RingCache, put_in_ring
from fwpkm_jax.core.padding import pack_all, pack_tokens
from fwpkm_jax.core.sequence.axis import Positions, SequenceAxis
from fwpkm_jax.core.sequence.ring import Keys, attention_around
from fwpkm_jax.layers.mixers.base import Mask
from fwpkm_jax.layers.mixers.window_cache import AttentionCache, attend_window, cache_before_shard

Cache = AttentionCache | RingCache
"""Of sliding-window and of full attention."""


def attend_shard(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    at: Positions,
    *,
    axis: SequenceAxis,
    window: int | None,
    cache: Cache | None = None,
    mask: Mask = None,
) -> tuple[Float[Array, "batch length heads head"], Cache | None]:
    """Attention of this device's shard of each sequence, inside `jax.shard_map`.

    Args:
      query: of this device's tokens.
      key: of this device's tokens.
      value: of this device's tokens.
      at: where these tokens stand in the sequence.
      window: tokens a query sees; None for all before it.
      cache: of the tokens before the whole sequence, equal on all devices.
      mask: of this device's tokens, 0 at padding.

    Returns:
      The heads' output before the gate, and on every device the cache after the last shard,
      None if none was given.
    """
    if window is not None:
        return _attend_window_shard(query, key, value, at, axis, window, cache, mask)
    # Keys and values go around the devices; queries stay where they are.
    own, first = Keys(key, value, *at), None
    if isinstance(cache, RingCache):
        before = None if at.numbers is None else jnp.zeros_like(cache.positions)
        cached = (cache.keys.astype(key.dtype), cache.values.astype(value.dtype))
        first = Keys(*cached, cache.positions, before)
    # A stream's ring forgets what is older than it; a whole sequence forgets nothing.
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


def _attend_window_shard(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    at: Positions,
    axis: SequenceAxis,
    window: int,
    cache: Any,
    mask: Mask,
) -> tuple[jax.Array, AttentionCache | None]:
    """`attend_shard` over a window: the tokens before the shard, as a cache of theirs."""
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
    before, documents = cache_before_shard(key, value, at, axis=axis, cache=start, counts=counts)
    output, end = attend_window(
        query, key, value, at.positions, before, counts, documents=documents
    )
    if packing is not None:
        # Back where the tokens stood, as the other devices' results are.
        places = packing.places[:, :, None, None]
        output = jnp.take_along_axis(output, places, axis=1)
    if cache is None:
        return output, None
    end = jax.tree.map(lambda x, like: x.astype(like.dtype), end, cache)
    return output, axis.from_last(end)
