"""A normaliser: the memory also stores a column written with the value 1."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def with_one(value: Float[Array, "*dims value"]) -> Float[Array, "*dims wider"]:
    """The value with a last entry 1, so that the memory's last column sums keys as others do."""
    return jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)


def divided(read: Float[Array, "*dims wider"]) -> Float[Array, "*dims value"]:
    """The read divided by its last entry; 0 where that entry is 0.

    With features that are never negative it is 0 only where nothing was read."""
    # The sum of the weights with which the other entries were read.
    total = read[..., -1:]
    return read[..., :-1] / jnp.where(total > 0, total, 1)
