"""A softmax-weighted mean over keys that come block by block."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Sums(NamedTuple):
    """The mean under way, by query.

    Attributes:
      highest: the highest score so far, to which the sums are relative.
      weight: the sum of the weights.
      value: the weighted sum of the values.
    """

    highest: Float[Array, "batch kv_heads shared queries"]
    weight: Float[Array, "batch kv_heads shared queries"]
    value: Float[Array, "batch kv_heads shared queries head"]

    @property
    def mean(self) -> Float[Array, "batch kv_heads shared queries head"]:
        """The mean over all keys seen; zeros for a query that has seen none."""
        return self.value / self.total[..., None]

    @property
    def total(self) -> Float[Array, "batch kv_heads shared queries"]:
        """The sum of the weights, 1 for a query that has seen no key."""
        return jnp.where(self.weight > 0, self.weight, 1)


def lowest(dtype: Any) -> float:
    """A score below all others; finite, so that a query that sees no key has no NaN."""
    return 0.5 * float(jnp.finfo(dtype).min)


def no_keys(shape: tuple[int, ...], *, head: int, dtype: Any) -> Sums:
    """The sums before the first key; `shape` is batch, kv_heads, shared, queries."""
    zeros = jnp.zeros(shape, dtype)
    return Sums(jnp.full(shape, lowest(dtype), dtype), zeros, jnp.zeros((*shape, head), dtype))


def add_keys(
    sums: Sums,
    scores: Float[Array, "batch kv_heads shared queries keys"],
    seen: Bool[Array, "#batch 1 1 queries keys"],
    value: Float[Array, "batch keys kv_heads head"],
) -> Sums:
    """The sums with a block of keys.

    Args:
      sums: of the blocks before.
      scores: scaled, in the dtype of the sums.
    """
    dtype = sums.value.dtype
    scores = jnp.where(seen, scores, lowest(dtype))
    highest = jnp.maximum(sums.highest, jnp.max(scores, axis=-1))
    # Earlier sums are relative to a lower score; at most 1, so that nothing overflows.
    rescale = jnp.exp(sums.highest - highest)
    # Without a seen key all scores equal the highest, and exp(0) would count them.
    weights = jnp.where(seen, jnp.exp(scores - highest[..., None]), 0)
    new = jnp.einsum(
        "bhrqk,bkhd->bhrqd", weights.astype(value.dtype), value, preferred_element_type=dtype
    )
    weight = rescale * sums.weight + jnp.sum(weights, axis=-1)
    return Sums(highest, weight, rescale[..., None] * sums.value + new)
