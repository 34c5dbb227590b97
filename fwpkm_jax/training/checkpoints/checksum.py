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


@jax.jit
def _checksum_of_words(words: jax.Array) -> jax.Array:
    """The checksum of a long vector of words, without a copy of it as 32-bit words."""
    whole = words.size // _LARGE

    def add(part: Any, total: jax.Array) -> jax.Array:
        first = part * _LARGE
        piece = jax.lax.dynamic_slice_in_dim(words, first, _LARGE)
        return total + checksum(piece, first.astype(jnp.uint32))

    total = jax.lax.fori_loop(0, whole, add, jnp.zeros((), jnp.uint32))
    return total + checksum(words[whole * _LARGE :], whole * _LARGE)


@jax.jit
def _all_finite(leaves: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.all(jnp.isfinite(leaf)) for name, leaf in leaves.items()}


def checksums(tree: Any) -> dict[str, int]:
    """Each array's checksum by its path name."""
    leaves = named_leaves(tree)
    # Of a large model one array at a time: each needs up to twice its size again, as words.
    small = {name: x for name, x in leaves.items() if x.size < _LARGE}
    values = jax.device_get(_checksums(small))
    for name, leaf in leaves.items():
        if name in small:
            continue
        words = _words_here(leaf)
        if words is not None:
            values[name] = jax.device_get(_checksum_of_words(words))
        else:  # Under one name, so that arrays of one shape share a program.
            values[name] = jax.device_get(_checksums({"": leaf}))[""]
    return {name: int(values[name]) for name in leaves}


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
    words = np.asarray(x).reshape(-1).view(_WORD[x.dtype.itemsize])
    return words if words.size < 2**31 else None  # Larger ones need larger indices.


def non_finite_leaves(tree: Any) -> list[str]:
    """Path names of the floating-point arrays that hold NaN or infinity, in the tree's order."""
    leaves = named_leaves(tree)
    floats = {n: x for n, x in leaves.items() if jnp.issubdtype(jnp.result_type(x), np.inexact)}
    finite = jax.device_get(_all_finite(floats))
    return [name for name in floats if not finite[name]]
