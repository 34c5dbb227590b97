"""The last tokens before each token, across padding, documents and pieces of a stream."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.rules.matrix.base import Starts, Tokens


class WindowState(NamedTuple):
    """A memory, and the tokens before, which the next one writes again, oldest first.

    Their weights are 0 at places that no token has taken yet.
    """

    matrix: Float[Array, "*dims key value"]
    keys: Float[Array, "*dims before key"]
    values: Float[Array, "*dims before value"]
    weights: Float[Array, "*dims before"]

    @classmethod
    def empty(cls, matrix: Float[Array, "batch heads key value"], window: int) -> "WindowState":
        """The state before the first token, with such a memory."""
        *dims, key, value = matrix.shape
        before = (*dims, window - 1)
        shapes = (*before, key), (*before, value), before
        return cls(matrix, *(jnp.zeros(shape, matrix.dtype) for shape in shapes))

    def window(self, token: Tokens, weight: Array) -> tuple[Array, Array, Array]:
        """Keys, values and weights of one head's last tokens, its newest the last."""

        def joined(old: Array, new: Array) -> Array:
            return jnp.concatenate([old, new[None]])

        return (
            joined(self.keys, token.key),
            joined(self.values, token.value),
            joined(self.weights, weight),
        )


def last_tokens(
    tokens: tuple[Array, Array, Array], before: tuple[Array, Array, Array], starts: Starts
) -> tuple[Array, Array, Array]:
    """Keys, values and weights of each token's window, its own the last.

    A token of weight 0 does not enter: its window is that of the last token that did. Places that
    no token of the document has taken are 0.

    Args:
      tokens: keys, values and weights, `[batch, length, heads, ...]`.
      before: the same of the tokens before the first, `[batch, heads, window - 1, ...]`.
      starts: first tokens of documents; None: all of it is one document.

    Returns:
      Keys, values and weights, `[batch, length, heads, window, ...]`.
    """
    if starts is None:
        starts = jnp.zeros(tokens[-1].shape[:2], bool)
    heads = jax.vmap(_of_head, in_axes=(1, 0, None), out_axes=1)
    return jax.vmap(heads)(tokens, before, starts)


def writes(x: Array) -> Array:
    """`[batch, length, heads, window, ...]` to `[batch, length * window, heads, ...]`."""
    x = jnp.moveaxis(x, 3, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _of_head(
    tokens: tuple[Array, Array, Array], before: tuple[Array, Array, Array], starts: Array
) -> tuple[Array, Array, Array]:
    """Of one head, `[length, window, ...]`."""
    keys, values, weights = map(jnp.concatenate, zip(before, tokens, strict=True))
    length, window = len(starts), before[-1].shape[0] + 1
    there = weights != 0
    # Places of those that entered, in order, and how many there are up to each token.
    order, count = jnp.argsort(~there, stable=True), jnp.cumsum(there)[window - 1 :]
    at = count[:, None] - window + jnp.arange(window)[None]
    place = order[jnp.maximum(at, 0)]
    # None from before the token's document.
    begin = jax.lax.cummax(jnp.where(starts, jnp.arange(length) + window - 1, 0))
    within = (at >= 0) & (place >= begin[:, None])

    def chosen(x: Array) -> Array:
        return jnp.where(jnp.expand_dims(within, range(2, x.ndim + 1)), x[place], 0)

    return chosen(keys), chosen(values), chosen(weights)
