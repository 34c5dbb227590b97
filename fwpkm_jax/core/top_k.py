"""The best few of many scores, by whatever is fastest on the device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_GROUP = 8  # Neighbouring scores that compete by their maximum first.


def top_k_ids(scores: Float[Array, "*batch choices"], k: int) -> Int[Array, "*batch {k}"]:
    """Where the `k` largest scores of the last axis stand, best first, the lower among equals.

    As `jax.lax.top_k`, but that 0 and -0 are equal, and without a gradient.

    Args:
      scores: `[..., choices]`; a NaN counts as larger than every number.
      k: at most `choices`.
    """
    # top_k ranks 0 above -0, which are equal scores: without the sign the lower one wins.
    scores = jax.lax.stop_gradient(jnp.where(scores == 0.0, 0.0, scores))
    return jax.lax.platform_dependent(
        scores,
        cpu=lambda x: jnp.moveaxis(_by_groups(jnp.moveaxis(x, -1, 0), k), 0, -1),
        default=lambda x: jax.lax.top_k(x, k)[1],
    )


def _by_groups(scores: jax.Array, k: int) -> jax.Array:
    """The best `k` along the first axis, the others side by side, which a CPU's vectors suit.

    The best k lie in the k groups of the largest maxima: were one outside, each of these groups
    would hold something better.
    """
    choices = scores.shape[0]
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    if choices % _GROUP == 0 and choices // _GROUP > k:
        maxima = scores.reshape(choices // _GROUP, _GROUP, *scores.shape[1:]).max(1)
        groups = _one_by_one(maxima, ids[: choices // _GROUP], k)
        within = jnp.arange(_GROUP, dtype=jnp.int32).reshape(1, _GROUP, *[1] * (scores.ndim - 1))
        ids = (_GROUP * groups[:, None] + within).reshape(k * _GROUP, *scores.shape[1:])
        scores = jnp.take_along_axis(scores, ids, axis=0)
    return _one_by_one(scores, ids, k)


def _one_by_one(scores: jax.Array, ids: jax.Array, k: int) -> jax.Array:
    """The `k` best in turn, each taken out when it is found; `ids` name the scores."""
    found = []
    for _ in range(k):
        best = scores == scores.max(0, keepdims=True)
        found.append(jnp.where(best, ids, jnp.iinfo(jnp.int32).max).min(0, keepdims=True))
        scores = jnp.where(ids == found[-1], -jnp.inf, scores)
    return jnp.concatenate(found)
