"""Checks of a tree of arrays: a checksum per array, and the names of arrays that are not finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.training.state import named_leaves


def checksum(x: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """A uint32 scalar: the sum of an array's words, each times an odd number that its index gives.

    A single flipped bit changes the sum, and so do zeros in place of a lost chunk. The sum wraps,
    so it does not depend on the order of addition: the same array split over another number of
    devices has the same checksum.

    Args:
      x: the array.
      first: index of its first word, if it is a part of a larger one.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, _WORD[x.dtype.itemsize]).astype(jnp.uint32)
    place, stride = jnp.asarray(first, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        iota = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = place + iota * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


_LARGE = 2**20  # Numbers.

# An array of 64-bit numbers becomes one with two words along a last axis.
_WORD = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


@jax.jit
def _checksums(leaves: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: checksum(leaf) for name, leaf in leaves.items()}


_checksum_of_piece = jax.jit(checksum)


@jax.jit
def _all_finite(leaves: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.all(jnp.isfinite(leaf)) for name, leaf in leaves.items()}


def checksums(tree: Any) -> dict[str, int]:
    """Each array's checksum by its path name."""
    leaves = named_leaves(tree)
    # Of a large model one array at a time: each needs up to twice its size again, as words.
    small = {name: x for name, x in leaves.items() if x.size < _LARGE}
    values = jax.device_get(_checksums(small))
    values |= {name: _of_large(leaf) for name, leaf in leaves.items() if name not in small}
    return {name: int(values[name]) for name in leaves}


def _of_large(leaf: Any) -> int:
    """The checksum of one array, in pieces of one size: one program for all, and little memory."""
    words = _words_here(leaf)
    if words is None:  # One name, so that arrays of one shape share a program.
        return int(_checksums({"": leaf})[""])
    total = 0
    for first in range(0, words.size, _LARGE):
        here = words[first : first + _LARGE]
        piece = np.zeros(_LARGE, words.dtype)  # Zeros behind the end add nothing.
        piece[: here.size] = here  # A copy: XLA may keep what it is called with for a while.
        total += int(_checksum_of_piece(piece, np.uint32(first % 2**32)))
    return total % 2**32


def _words_here(x: Any) -> np.ndarray | None:
    """The words of an array in the host's memory, a copy only if it has parts; else None."""
    if isinstance(x, jax.Array):
        on_host = all(device.platform == "cpu" for device in x.sharding.device_set)
        if not on_host or not x.is_fully_addressable:
            return None
        if len(x.sharding.device_set) > 1:  # np.asarray(x) would keep its copy.
            whole = np.empty(x.shape, x.dtype)
            for shard in x.addressable_shards:
                whole[shard.index] = np.asarray(shard.data)
            x = whole
    return np.asarray(x).reshape(-1).view(_WORD[x.dtype.itemsize])


def non_finite_leaves(tree: Any) -> list[str]:
    """Path names of the floating-point arrays that hold NaN or infinity, in the tree's order."""
    leaves = named_leaves(tree)
    floats = {n: x for n, x in leaves.items() if jnp.issubdtype(jnp.result_type(x), np.inexact)}
    finite = jax.device_get(_all_finite(floats))
    return [name for name in floats if not finite[name]]
