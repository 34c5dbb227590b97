"""Checks of a tree of arrays: a checksum per array, and the names of arrays that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.training.state import named_leaves


def checksum(
    x: jax.Array, first: jax.Array | int = 0, count: jax.Array | int | None = None
) -> jax.Array:
    """A uint32 scalar: the sum of an array's words, each mixed with its index first.

    The mix is that of a hash, so that no change of some bits is undone by the same change of
    others, as of two signs. The sum wraps, so it does not depend on the order of addition: the
    same array split over another number of devices has the same checksum.

    Args:
      first: index of its first word, if it is a part of a larger one.
      count: number of its words that count, if it has one axis; None: all.

    References: the finalizer of MurmurHash3 (Austin Appleby, public domain).
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
    mixed = _mixed(bits + _mixed(place + jnp.uint32(1)))
    if count is not None:
        mixed = jnp.where(jnp.arange(bits.shape[0]) < count, mixed, 0)
    return jnp.sum(mixed, dtype=jnp.uint32)


def _mixed(words: jax.Array) -> jax.Array:
    """Words of which every bit depends on every bit of the given ones, one to one."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> jnp.uint32(shift))) * jnp.uint32(factor)
    return words ^ (words >> jnp.uint32(16))


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
        piece = np.zeros(_LARGE, words.dtype)
        piece[: here.size] = here  # A copy: XLA may keep what it is called with for a while.
        total += int(_checksum_of_piece(piece, np.uint32(first % 2**32), here.size))
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
