"""A normaliser: the memory also stores a column written with the value 1."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def with_one(value: Float[Array, "*dims value"]) -> Float[Array, "*dims wider"]:
    """The value with a last entry 1, so that the memory's last column sums keys as others do."""
    return jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)


def divided(read: Float[Array, "*dims wider"]) -> Float[Array, "*dims value"]:
    """What was read over its last entry; 0 where that is 0, as features that are never negative
    make it only where nothing was read at all."""
    total = read[..., -1:]
    return read[..., :-1] / jnp.where(total > 0, total, 1)
