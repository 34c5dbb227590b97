"""Causal softmax attention over the last `window` positions, or over all.

Tokens carry their positions, so that cached keys and padding need no special case: a query sees
the keys at `query position - window < position <= query position`, and a key at position -1
(an empty cache entry, padding) is seen by none.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.precision import compute_dtype


def masked_attention(
    query: Float[Array, "batch queries heads head"],
    key: Float[Array, "batch keys kv_heads head"],
    value: Float[Array, "batch keys kv_heads head"],
    *,
    query_positions: Int[Array, "batch queries"],
    key_positions: Int[Array, "batch keys"],
    window: int | None,
) -> Float[Array, "batch queries heads head"]:
    """Attention that scores every query against every key; memory grows with their product.

    Query head h reads key-value head `h // (heads / kv_heads)`. Scores and softmax are in at
    least float32. A query that sees no key gets zeros.

    Args:
      query: `[batch, queries, heads, head]`; scores are scaled by `head ** -0.5`.
      key: `[batch, keys, kv_heads, head]`.
      value: `[batch, keys, kv_heads, head]`.
      query_positions: `[batch, queries]`.
      key_positions: `[batch, keys]`, -1 for keys to hide.
      window: positions seen, the query's own included; None for all up to the query's.

    Returns:
      `[batch, queries, heads, head]` in the dtype of `value`.
    """
    chex.assert_rank([query, key, value], 4)
    chex.assert_equal_shape([key, value])
    batch, queries, heads, head = query.shape
    keys, kv_heads = key.shape[1:3]
    chex.assert_shape(key, (batch, keys, kv_heads, head))
    chex.assert_shape(query_positions, (batch, queries))
    chex.assert_shape(key_positions, (batch, keys))
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly.")

    dtype = compute_dtype(query.dtype, key.dtype)
    query = query.reshape(batch, queries, kv_heads, heads // kv_heads, head)
    scores = jnp.einsum("bqhrd,bkhd->bhrqk", query, key, preferred_element_type=dtype)
    at, key_at = query_positions[:, :, None], key_positions[:, None, :]
    seen = (key_at >= 0) & (key_at <= at)
    if window is not None:
        seen &= key_at > at - window
    seen = seen[:, None, None]
    # A finite score for hidden keys, so that a row without any seen key has no NaN in it.
    scores = jnp.where(seen, scores * head**-0.5, 0.5 * jnp.finfo(dtype).min)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0).astype(value.dtype)
    output = jnp.einsum("bhrqk,bkhd->bqhrd", weights, value, preferred_element_type=dtype)
    return output.reshape(batch, queries, heads, head).astype(value.dtype)


def blockwise_attention(
    query: Float[Array, "batch queries heads head"],
    key: Float[Array, "batch keys kv_heads head"],
    value: Float[Array, "batch keys kv_heads head"],
    *,
    query_positions: Int[Array, "batch queries"],
    key_positions: Int[Array, "batch keys"],
    window: int,
) -> Float[Array, "batch queries heads head"]:
    """`masked_attention` over a window at a cost linear in the length.

    Queries are cut into blocks of `window`; a block's keys are its own and the block before.

    Args:
      query: as in `masked_attention`.
      key: the keys of `window` earlier tokens (position -1 where there are none), then the keys
        of the queries' own tokens. Tokens with a position must stand in unbroken order.
      value: as `key`.
      query_positions: as in `masked_attention`.
      key_positions: as in `masked_attention`.
      window: positions seen, the query's own included.

    Returns:
      As `masked_attention`.

    Raises:
      ValueError: there are not `window` more keys than queries.
    """
    batch, queries, heads, head = query.shape
    if key.shape[1] != window + queries:
        raise ValueError(
            f"{key.shape[1]} keys for {queries} queries; put window={window} keys of earlier "
            "tokens, or empty ones at position -1, before the queries' own."
        )
    blocks = -(-queries // window)
    added = blocks * window - queries

    def pad(x, fill=0):
        widths = [(0, 0), (0, added)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, widths, constant_values=fill)

    def own_block(x):
        return x.reshape(batch * blocks, window, *x.shape[2:])

    def with_previous(x):
        x = x.reshape(batch, blocks + 1, window, *x.shape[2:])
        x = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)
        return x.reshape(batch * blocks, 2 * window, *x.shape[3:])

    output = masked_attention(
        own_block(pad(query)),
        with_previous(pad(key)),
        with_previous(pad(value)),
        query_positions=own_block(pad(query_positions, -1)),
        key_positions=with_previous(pad(key_positions, -1)),
        window=window,
    )
    return output.reshape(batch, blocks * window, heads, head)[:, :queries]
