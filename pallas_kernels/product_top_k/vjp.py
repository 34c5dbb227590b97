"""Cotangents of an address: they enter through the chosen scores alone.

One dense coefficient per (token, sub-key), mostly zero, turns them into two matrix products, which
XLA does best. Everything here is plain JAX, so that the VJP can be differentiated again.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.addressing import (
    IDW_EPSILON,
    Address,
    Score,
    scatter_sub_keys,
    split_halves,
)
from fwpkm_jax.core.array_types import Queries, SubKeys
from pallas_kernels.dispatch import Implementation

_FULL = jax.lax.Precision.HIGHEST


def cotangents(
    queries: Queries,
    keys: SubKeys,
    address: Address,
    slot_cotangents: Float[Array, "tokens heads top_k"],
    sub_key_cotangents: Float[Array, "tokens heads 2 top_k"],
    *,
    score: Score,
    on: Implementation,
) -> tuple[Queries, SubKeys]:
    """Cotangents of queries and keys for those of the slots' and the sub-keys' scores.

    Args:
      queries: `[tokens, heads, key]`.
      keys: `[heads, 2, subkeys, key // 2]`.
      address: of the forward pass.
      slot_cotangents: of the slots' scores.
      sub_key_cotangents: of the sub-keys' scores.
      score: `idw` or `dot`.
      on: what ran forward; the coefficients are laid out as its device does best.
    """
    subkeys = keys.shape[2]
    halves = split_halves(queries)
    chosen = sub_key_cotangents + _of_pairs(slot_cotangents, address, subkeys)
    if score == "idw":
        # d(-log(eps + r^2)) / d(r^2) = -1 / (eps + r^2) = -exp(score), and d(r^2) = 2 (q - k) dq.
        inside = address.sub_key_scores < -jnp.log(jnp.asarray(IDW_EPSILON, chosen.dtype))
        # At distance 0 the logarithm is clamped, and the slope is 0.
        chosen = jnp.where(inside, -2.0 * chosen * jnp.exp(address.sub_key_scores), 0.0)

    lay_out = scatter_sub_keys if on == "reference" else _compare_sub_keys
    dense = lay_out(chosen, address.sub_key_ids, subkeys)
    to_queries = jnp.einsum("hpst,hpsk->thpk", dense, keys, precision=_FULL)
    to_keys = jnp.einsum("hpst,thpk->hpsk", dense, halves, precision=_FULL)
    if score == "idw":
        to_queries = jnp.sum(chosen, axis=-1, keepdims=True) * halves - to_queries
        to_keys = jnp.sum(dense, axis=3)[..., None] * keys - to_keys
    return to_queries.reshape(queries.shape), to_keys


def _compare_sub_keys(
    chosen: Float[Array, "tokens heads 2 top_k"],
    sub_key_ids: Int[Array, "tokens heads 2 top_k"],
    num_subkeys: int,
) -> Float[Array, "heads 2 subkeys tokens"]:
    """`scatter_sub_keys` by comparing: accelerators scatter single numbers one after the other."""
    chosen, sub_key_ids = (jnp.moveaxis(x, 0, 3) for x in (chosen, sub_key_ids))
    sub_keys = jnp.arange(num_subkeys, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
    same = sub_key_ids[:, :, :, None] == sub_keys
    return jnp.sum(jnp.where(same, chosen[:, :, :, None], 0.0), axis=2)


def _of_pairs(
    slot_cotangents: Float[Array, "tokens heads top_k"], address: Address, subkeys: int
) -> Float[Array, "tokens heads 2 top_k"]:
    """A slot's score is the sum of two sub-keys' scores: its cotangent goes to both."""
    row, column = address.slot_ids // subkeys, address.slot_ids % subkeys
    sub_keys = jnp.stack([row, column], axis=2)  # [tokens, heads, 2, top_k]
    same = address.sub_key_ids[..., :, None] == sub_keys[..., None, :]
    return jnp.sum(jnp.where(same, slot_cotangents[:, :, None, None, :], 0.0), axis=-1)
