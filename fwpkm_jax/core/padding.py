"""Moves padding behind the real tokens, for layers that look at neighbouring tokens.

A layer that moves each sequence's real tokens to the front can treat them as an unbroken sequence.
Padding is then never between two tokens, within a convolution or a window, or in a cache. It has no
effect, whether it was on the left, on the right or in between.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.array_types import TokenMask


class Packing(NamedTuple):
    """Where real tokens go, from `pack_tokens`."""

    order: Int[Array, "batch length"]
    """Original index of the token at each packed place: real tokens first, in order."""
    places: Int[Array, "batch length"]
    """Packed place of each original token."""
    is_real: Bool[Array, "batch length"]
    """Whether a packed place holds a real token."""
    counts: Int[Array, " batch"]
    """Real tokens of each sequence."""


def pack_tokens(mask: TokenMask) -> Packing:
    """The reordering that puts each sequence's real tokens (`mask` not 0) first."""
    chex.assert_rank(mask, 2)
    real = mask.astype(bool)
    # Stable: real tokens keep their order.
    order = jnp.argsort(~real, axis=1, stable=True).astype(jnp.int32)
    # The inverse of a permutation is its argsort.
    places = jnp.argsort(order, axis=1).astype(jnp.int32)
    counts = jnp.sum(real, axis=1, dtype=jnp.int32)
    is_real = jnp.arange(mask.shape[1])[None, :] < counts[:, None]
    return Packing(order, places, is_real, counts)


def pack(
    x: Float[Array, "batch length model"], packing: Packing | None
) -> Float[Array, "batch length model"]:
    """The real tokens, first and in order; zeros after them. Without packing, `x`."""
    if packing is None:
        return x
    x = jnp.take_along_axis(x, packing.order[:, :, None], axis=1)
    return jnp.where(packing.is_real[:, :, None], x, 0)


def unpack(
    x: Float[Array, "batch length model"], packing: Packing | None
) -> Float[Array, "batch length model"]:
    """Real tokens at their places before `pack`; zeros at padding. Without packing, `x`."""
    if packing is None:
        return x
    x = jnp.where(packing.is_real[:, :, None], x, 0)
    return jnp.take_along_axis(x, packing.places[:, :, None], axis=1)


def pack_all(tree: Any, packing: Packing | None) -> Any:
    """Leaves `[batch, length, ...]` of any dtype in packed order; what is at padding stays there.

    Without packing, the tree.
    """
    if packing is None:
        return tree

    def take(x: jax.Array) -> jax.Array:
        order = jnp.expand_dims(packing.order, tuple(range(2, x.ndim)))
        return jnp.take_along_axis(x, order, axis=1)

    return jax.tree.map(take, tree)


def last_rows(
    x: Float[Array, "batch rows *dims"] | Int[Array, "batch rows *dims"],
    *,
    size: int,
    end: Int[Array, " batch"] | None,
) -> Float[Array, "batch size *dims"] | Int[Array, "batch size *dims"]:
    """Each sequence's `size` rows before row `end`; `end` None for the last rows of all."""
    if end is None:
        return x[:, x.shape[1] - size :]
    rows = (end - size)[:, None] + jnp.arange(size)[None, :]
    return jnp.take_along_axis(x, jnp.expand_dims(rows, range(2, x.ndim)), axis=1)
