"""Arrays as both kernels read them, and the pairs of ranks that can be among the best.

Kernels take whole tiles: tokens, sub-keys and half widths are padded up to multiples, which costs
nothing at the paper's sizes. Zeros change no product; padded sub-keys are masked in the kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.addressing import Address


class Operands(NamedTuple):
    """Padded queries and keys.

    Attributes:
      queries: columns are the heads' row halves and column halves in turn.
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


def address(
    slot_ids: Int[Array, "heads top_k padded_tokens"],
    slot_scores: Float[Array, "heads top_k padded_tokens"],
    sub_key_ids: Int[Array, "codebooks top_k padded_tokens"],
    sub_key_scores: Float[Array, "codebooks top_k padded_tokens"],
    *,
    tokens: int,
) -> Address:
    """The kernels' results, which have tokens innermost, as an `Address` without padding."""

    def by_token(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x[..., :tokens], -1, 0)

    def by_codebook(x: jax.Array) -> jax.Array:
        codebooks, top_k, padded = x.shape
        return by_token(x.reshape(codebooks // 2, 2, top_k, padded))

    return Address(
        by_token(slot_ids), by_token(slot_scores), by_codebook(sub_key_ids),
        by_codebook(sub_key_scores),
    )  # fmt: skip


def partners(top_k: int) -> list[int]:
    """How many best columns can pair with each row rank: ranks i and j (from 1) need i j <= K."""
    return [top_k // (rank + 1) for rank in range(top_k)]


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)
