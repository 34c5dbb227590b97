"""Arranges arrays for the GPU and TPU kernels, and lists the pairs of ranks that can be best.

Kernels work on whole tiles, so tokens, sub-keys and half widths are padded with zeros to multiples;
the paper's sizes need no padding. Zeros do not change products, and kernels mask padded sub-keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fwpkm_jax.core.array_types import Queries, SubKeys


class Operands(NamedTuple):
    """Padded queries and keys.

    Attributes:
      queries: columns are the row half and the column half of each head in turn.
      keys: codebooks of all heads in the same order.
    """

    queries: Float[Array, "padded_tokens columns"]
    keys: Float[Array, "codebooks padded_subkeys padded_half"]


def operands(
    queries: Queries, keys: SubKeys, *, token_tile: int, subkey_tile: int, half_tile: int
) -> Operands:
    """Both arrays with every padded axis a multiple of its tile."""
    tokens, heads, _ = queries.shape
    _, _, subkeys, half = keys.shape
    halves = queries.reshape(tokens, heads * 2, half)
    halves = _pad(_pad(halves, 0, token_tile), 2, half_tile)
    codebooks = _pad(_pad(keys.reshape(heads * 2, subkeys, half), 1, subkey_tile), 2, half_tile)
    return Operands(halves.reshape(halves.shape[0], -1), codebooks)


def by_token(
    x: Shaped[Array, "rows top_k padded_tokens"], tokens: int
) -> Shaped[Array, "tokens rows top_k"]:
    """A kernel's result, whose last axis is tokens, without padding and with tokens first."""
    return jnp.moveaxis(x[..., :tokens], -1, 0)


def by_codebook(
    x: Shaped[Array, "codebooks top_k padded_tokens"], tokens: int
) -> Shaped[Array, "tokens heads 2 top_k"]:
    """`by_token`, with an axis for the two codebooks of a head."""
    x = by_token(x, tokens)
    return x.reshape(tokens, -1, 2, x.shape[-1])


def codebooks(
    x: Shaped[Array, "tokens heads 2 top_k"], *, token_tile: int
) -> Shaped[Array, "codebooks top_k padded_tokens"]:
    """The way back of `by_codebook`."""
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    return _pad(jnp.moveaxis(x, 0, -1), 2, token_tile)


def partners(top_k: int) -> list[int]:
    """Number of column ranks that can pair with each row rank: i j <= K for ranks from 1."""
    return [top_k // (rank + 1) for rank in range(top_k)]


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)
