"""Cotangents of a selection, which depend on the chosen scores only.

This file is plain JAX, so that the VJP can be differentiated again.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.keys.addressing import Score, SubKeyChoice
from fwpkm_jax.core.slots.keys.gradients import keys_cotangent, queries_cotangent, score_pulls


def cotangents(
    queries: Queries,
    keys: SubKeys,
    choice: SubKeyChoice,
    sub_key_cotangents: Float[Array, "tokens heads 2 top_k"],
    *,
    score: Score,
) -> tuple[Queries, SubKeys]:
    """Cotangents of queries and keys, from the cotangents of the chosen sub-keys' scores.

    Args:
      queries: `[tokens, heads, key]`.
      keys: `[heads, 2, subkeys, key // 2]`.
      choice: what the forward pass returned.
      sub_key_cotangents: cotangents of the sub-keys' scores.
      score: `idw` or `dot`.
    """
    pulls = score_pulls(choice.sub_key_scores, sub_key_cotangents, score=score)
    ids = choice.sub_key_ids
    to_queries = queries_cotangent(queries, keys, ids, pulls, score=score)
    return to_queries, keys_cotangent(queries, keys, ids, pulls, score=score)


def of_pairs(
    slot_cotangents: Float[Array, "tokens heads top_k"],
    slot_ids: Int[Array, "tokens heads top_k"],
    sub_key_ids: Int[Array, "tokens heads 2 top_k"],
    *,
    num_subkeys: int,
) -> Float[Array, "tokens heads 2 top_k"]:
    """Passes each slot's cotangent to both sub-keys, because its score is the sum of theirs."""
    row, column = slot_ids // num_subkeys, slot_ids % num_subkeys
    sub_keys = jnp.stack([row, column], axis=2)  # [tokens, heads, 2, top_k]
    same = sub_key_ids[..., :, None] == sub_keys[..., None, :]
    return jnp.sum(jnp.where(same, slot_cotangents[:, :, None, None, :], 0.0), axis=-1)
