"""The few largest of many scores, by the method that is fastest on the device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_GROUP = 8  # Size of the groups of neighbouring scores whose maxima are compared first.


def top_k_ids(
    scores: Float[Array, "*batch choices tokens"], k: int
) -> Int[Array, "*batch {k} tokens"]:
    """Ids of each token's `k` largest scores, best first; of equal scores the lower id comes first.

    Like `jax.lax.top_k`, but along the second last axis, without a gradient, and with 0 equal to
    -0.

    Args:
      scores: `[..., choices, tokens]`; a NaN counts as larger than every number.
      k: at most `choices`.
    """
    # top_k ranks 0 above -0, which are equal scores: without the sign the lower one wins.
    scores = jax.lax.stop_gradient(jnp.where(scores == 0.0, 0.0, scores))
    return jax.lax.platform_dependent(
        scores,
        cpu=lambda x: _by_groups(x, k),
        default=lambda x: jnp.swapaxes(jax.lax.top_k(jnp.swapaxes(x, -1, -2), k)[1], -1, -2),
    )


def _by_groups(scores: jax.Array, k: int) -> jax.Array:
    """`top_k_ids` with tokens side by side, which suits a CPU's vector units.

    The best k scores lie in the k groups with the largest maxima: if one lay outside, each of these
    groups would hold a better score.
    """
    *batch, choices, tokens = scores.shape
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 2)
    if choices % _GROUP == 0 and choices // _GROUP > k:
        maxima = scores.reshape(*batch, choices // _GROUP, _GROUP, tokens).max(-2)
        groups = _one_by_one(maxima, ids[..., : choices // _GROUP, :], k)
        inside = (*batch, k, _GROUP, tokens)
        within = jax.lax.broadcasted_iota(jnp.int32, inside, len(inside) - 2)
        ids = (_GROUP * groups[..., None, :] + within).reshape(*batch, k * _GROUP, tokens)
        scores = jnp.take_along_axis(scores, ids, axis=-2)
    return _one_by_one(scores, ids, k)


def _one_by_one(scores: jax.Array, ids: jax.Array, k: int) -> jax.Array:
    """The ids of the `k` best, found one after the other; `ids` are the ids of the scores."""
    found = []
    for _ in range(k):
        best = scores == scores.max(-2, keepdims=True)
        found.append(jnp.where(best, ids, jnp.iinfo(jnp.int32).max).min(-2, keepdims=True))
        scores = jnp.where(ids == found[-1], -jnp.inf, scores)
    return jnp.concatenate(found, axis=-2)
