"""Cotangents of an address, which depend on the chosen scores only.

This file is plain JAX, so that the VJP can be differentiated again.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.addressing import IDW_EPSILON, Address, Score, split_halves
from fwpkm_jax.core.slots.sub_keys import add_to_sub_keys, sub_key_totals, sum_of_sub_keys


def cotangents(
    queries: Queries,
    keys: SubKeys,
    address: Address,
    slot_cotangents: Float[Array, "tokens heads top_k"],
    sub_key_cotangents: Float[Array, "tokens heads 2 top_k"],
    *,
    score: Score,
) -> tuple[Queries, SubKeys]:
    """Cotangents of queries and keys, from the cotangents of slot and sub-key scores.

    Args:
      queries: `[tokens, heads, key]`.
      keys: `[heads, 2, subkeys, key // 2]`.
      address: the address that the forward pass returned.
      slot_cotangents: cotangents of the slots' scores.
      sub_key_cotangents: cotangents of the sub-keys' scores.
      score: `idw` or `dot`.
    """
    subkeys = keys.shape[2]
    halves = split_halves(queries)
    chosen = sub_key_cotangents + _of_pairs(slot_cotangents, address, subkeys)
    if score == "idw":
        # d(-log(eps + r^2)) / d(r^2) = -1 / (eps + r^2) = -exp(score), and d(r^2) = 2 (q - k) dq.
        inside = address.sub_key_scores < -jnp.log(jnp.asarray(IDW_EPSILON, chosen.dtype))
        # At distance 0 the distance is clamped, so the derivative is 0.
        chosen = jnp.where(inside, -2.0 * chosen * jnp.exp(address.sub_key_scores), 0.0)

    to_queries = sum_of_sub_keys(chosen, address.sub_key_ids, keys)
    to_keys = add_to_sub_keys(chosen, address.sub_key_ids, halves, subkeys)
    if score == "idw":
        to_queries = jnp.sum(chosen, axis=-1, keepdims=True) * halves - to_queries
        totals = sub_key_totals(chosen, address.sub_key_ids, subkeys)
        to_keys = totals[..., None] * keys - to_keys
    return to_queries.reshape(queries.shape), to_keys


def _of_pairs(
    slot_cotangents: Float[Array, "tokens heads top_k"], address: Address, subkeys: int
) -> Float[Array, "tokens heads 2 top_k"]:
    """Passes each slot's cotangent to both sub-keys, because its score is the sum of theirs."""
    row, column = address.slot_ids // subkeys, address.slot_ids % subkeys
    sub_keys = jnp.stack([row, column], axis=2)  # [tokens, heads, 2, top_k]
    same = address.sub_key_ids[..., :, None] == sub_keys[..., None, :]
    return jnp.sum(jnp.where(same, slot_cotangents[:, :, None, None, :], 0.0), axis=-1)
