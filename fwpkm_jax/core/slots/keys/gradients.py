"""Cotangents of queries and keys from those of the scores of the chosen sub-keys.

The ids of a choice have no cotangent, so no other score takes part.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.keys.addressing import IDW_EPSILON, Score, split_halves
from fwpkm_jax.core.slots.keys.sums import add_to_sub_keys, sub_key_totals, sum_of_sub_keys

ChosenIds = Int[Array, "tokens heads 2 top_k"]
ChosenNumbers = Float[Array, "tokens heads 2 top_k"]


def score_coefficients(
    scores: ChosenNumbers, score_cotangents: ChosenNumbers, *, score: Score
) -> ChosenNumbers:
    """What multiplies `query - sub-key` in both cotangents, for `dot` query or sub-key alone."""
    if score == "dot":
        return score_cotangents
    # d(-log(eps + r^2)) / d(r^2) = -1 / (eps + r^2) = -exp(score), and d(r^2) = 2 (q - k) dq.
    inside = scores < -jnp.log(jnp.asarray(IDW_EPSILON, scores.dtype))
    # At distance 0 the distance is clamped, so the derivative is 0.
    return jnp.where(inside, -2.0 * score_cotangents * jnp.exp(scores), 0.0)


def queries_cotangent(
    queries: Queries,
    keys: SubKeys,
    sub_key_ids: ChosenIds,
    coefficients: ChosenNumbers,
    *,
    score: Score,
) -> Queries:
    """The queries' cotangents from `score_coefficients`."""
    halves = split_halves(queries)
    to_queries = sum_of_sub_keys(coefficients, sub_key_ids, keys)
    if score == "idw":
        to_queries = jnp.sum(coefficients, axis=-1, keepdims=True) * halves - to_queries
    return to_queries.reshape(queries.shape)


def keys_cotangent(
    queries: Queries,
    keys: SubKeys,
    sub_key_ids: ChosenIds,
    coefficients: ChosenNumbers,
    *,
    score: Score,
) -> SubKeys:
    """The keys' cotangents from `score_coefficients`."""
    subkeys = keys.shape[2]
    to_keys: Any = add_to_sub_keys(coefficients, sub_key_ids, split_halves(queries), subkeys)
    if score == "dot":
        return to_keys
    return sub_key_totals(coefficients, sub_key_ids, subkeys)[..., None] * keys - to_keys
