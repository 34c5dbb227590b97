"""What windowed attention keeps of the tokens before, in streams and from device to device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.attention.softmax import Persistent, attend_causally
from fwpkm_jax.core.padding import last_rows
from fwpkm_jax.core.sequence.axis import Positions, SequenceAxis
from fwpkm_jax.core.sequence.halo import halo_exchange


class AttentionCache(NamedTuple):
    """The latest tokens' keys and values, oldest first; position -1 marks an empty entry."""

    keys: Float[Array, "batch capacity kv_heads head"]
    values: Float[Array, "batch capacity kv_heads head"]
    positions: Int[Array, "batch capacity"]
    next_position: Int[Array, " batch"]


def attend_window(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    positions: Int[Array, "batch length"],
    cache: AttentionCache,
    counts: Int[Array, " batch"] | None,
    persistent: Persistent | None = None,
    documents: Int[Array, "batch length"] | None = None,
    fresh: AttentionCache | None = None,
) -> tuple[Float[Array, "batch length heads head"], AttentionCache]:
    """Windowed attention to the cached tokens and the new ones, before the gate; the new cache.

    `counts` says how many tokens of each sequence are real, None for all; `documents`, how many
    documents have started up to each token; `fresh` is the cache before each document, None: empty.
    """
    length, capacity = query.shape[1], cache.keys.shape[1]
    keys = jnp.concatenate([cache.keys, key.astype(cache.keys.dtype)], axis=1)
    values = jnp.concatenate([cache.values, value.astype(cache.values.dtype)], axis=1)
    # Empty entries have position -1, so that no query sees them.
    key_positions = jnp.concatenate([cache.positions, positions], axis=1)
    output = attend_causally(
        *(query, keys.astype(key.dtype), values.astype(value.dtype)),
        positions=positions,
        key_positions=key_positions,
        window=capacity,
        persistent=persistent,
        documents=documents,
    )
    following = cache.next_position + (length if counts is None else counts)
    if documents is not None:
        key_positions, following = _of_last_document(key_positions, documents, following)
    # Packed tokens come first, so the latest real token ends at capacity + count.
    end = None if counts is None else capacity + counts
    after = AttentionCache(
        keys=last_rows(keys, size=capacity, end=end),
        values=last_rows(values, size=capacity, end=end),
        positions=last_rows(key_positions, size=capacity, end=end),
        next_position=following,
    )
    if documents is None or fresh is None:
        return output, after
    return output, _behind(fresh, after, begun=jnp.max(documents, axis=1) > 0)


def _behind(
    fresh: AttentionCache, after: AttentionCache, *, begun: Bool[Array, " batch"]
) -> AttentionCache:
    """The cache of documents that have begun in the piece, with the tokens before them in front."""
    # The cache of a document younger than the window still shows the tokens before it.
    capacity = after.positions.shape[1]
    number = (after.next_position - fresh.next_position)[:, None]  # Tokens of the document.
    at = jnp.arange(capacity, dtype=jnp.int32)[None]
    in_front = begun[:, None] & (at < capacity - number)

    def join(first: jax.Array, x: jax.Array) -> jax.Array:
        own = (...,) + (None,) * (x.ndim - 2)
        moved = jnp.take_along_axis(first, jnp.minimum(at + number, capacity - 1)[own], axis=1)
        return jnp.where(in_front[own], moved, x)

    keys, values, positions = (join(*x) for x in zip(fresh[:3], after[:3], strict=True))
    return AttentionCache(keys, values, positions, after.next_position)


def cache_before_shard(
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    at: Positions,
    *,
    axis: SequenceAxis,
    cache: AttentionCache,
    counts: Int[Array, " batch"] | None = None,
) -> tuple[AttentionCache, Int[Array, "batch length"] | None]:
    """The cache that a device's shard of each sequence starts from, inside `jax.shard_map`.

    Each device sends the keys and values of its last tokens, as many as the cache holds.

    Args:
      key: of this device's tokens.
      value: of this device's tokens.
      at: where these tokens stand in the sequence.
      cache: of the tokens before the whole sequence, equal on all devices.
      counts: real tokens of the shard, which come first; None: all are real.

    Returns:
      The cache, and how many documents have started in the shard up to each token, 0 for the one
      that goes on; None if rows are one document.
    """
    numbers = jnp.zeros_like(at.positions) if at.numbers is None else at.numbers
    keys, values, positions, before_numbers = halo_exchange(
        (key, value, at.positions, numbers),
        (cache.keys, cache.values, cache.positions, jnp.zeros_like(cache.positions)),
        axis=axis,
        counts=counts,
    )
    # Of the tokens before the shard only those of its first document are seen.
    last = before_numbers[:, -1:]
    positions = jnp.where(before_numbers == last, positions, -1)
    documents = None if at.numbers is None else numbers - last
    following = jnp.where(axis.index > 0, positions[:, -1] + 1, cache.next_position)
    return AttentionCache(keys, values, positions, following), documents


def _of_last_document(
    key_positions: Int[Array, "batch keys"],
    documents: Int[Array, "batch length"],
    following: Int[Array, " batch"],
) -> tuple[Int[Array, "batch keys"], Int[Array, " batch"]]:
    """Positions of cached and new keys, -1 outside the last document, and the next one.

    Args:
      key_positions: of the cached keys, then of the new ones.
      documents: documents that have started up to each new token.
      following: the next position if none has started.
    """
    last = jnp.max(documents, axis=1)
    cached = key_positions.shape[1] - documents.shape[1]
    numbers = jnp.pad(documents, ((0, 0), (cached, 0)))
    # Earlier documents' keys stay in the cache, but no later token may see them.
    positions = jnp.where(numbers == last[:, None], key_positions, -1)
    return positions, jnp.where(last == 0, following, jnp.max(positions, axis=1) + 1)
