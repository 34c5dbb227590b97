"""Sums over the sub-keys that tokens chose, a few out of many: linear in each argument.

A CPU moves the chosen rows, whose number does not depend on the number of sub-keys. Other devices
lay the coefficients out, mostly zeros, and multiply matrices. Both may be differentiated again.

A GPU's tensor cores have no float32 products. There each operand is the sum of two bfloat16 terms,
and three of their four products are added in float32. The fourth is below 2^-16 of the operands;
the results are within 5e-6 of their norm.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import SubKeys
from fwpkm_jax.core.platform import platform
from fwpkm_jax.core.slots.values.rows import add_by_blocks, dot_by_blocks, read_by_blocks

_FULL = jax.lax.Precision.HIGHEST
_THREE_PRODUCTS = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3


Coefficients = Float[Array, "tokens heads 2 top_k"]
Ids = Int[Array, "tokens heads 2 top_k"]
Vectors = Float[Array, "tokens heads 2 half"]


def sub_key_totals(
    coefficients: Coefficients, sub_key_ids: Ids, num_subkeys: int
) -> Float[Array, "heads 2 subkeys"]:
    """The coefficients of each sub-key, summed over the tokens that chose it."""
    # Few additions: top_k for each token and codebook, however many sub-keys there are.
    if platform() == "cpu":
        rows = _rows(sub_key_ids, num_subkeys)
        none = jnp.zeros((coefficients.shape[1] * 2 * num_subkeys,), coefficients.dtype)
        return none.at[rows].add(coefficients.reshape(rows.shape)).reshape(-1, 2, num_subkeys)
    return _one_hot_sum(coefficients, sub_key_ids, num_subkeys).sum(3)


# The cotangents of the next three are computed by the other two, so derivatives of any order exist.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def add_to_sub_keys(
    coefficients: Coefficients, sub_key_ids: Ids, vectors: Vectors, num_subkeys: int
) -> Float[Array, "heads 2 subkeys half"]:
    """Adds each token's vector, times a coefficient, to every sub-key that it chose."""
    if platform() == "cpu":
        _, heads, _, half = vectors.shape
        rows = _rows(sub_key_ids, num_subkeys)
        none = jnp.zeros((heads * 2 * num_subkeys, half), vectors.dtype)
        coefficients, vectors = coefficients.reshape(rows.shape), vectors.reshape(-1, half)
        added = add_by_blocks(none, rows, coefficients, vectors)
        return added.reshape(heads, 2, num_subkeys, half)
    dense = _one_hot_sum(coefficients, sub_key_ids, num_subkeys)
    return jnp.einsum("hpst,thpk->hpsk", dense, vectors, precision=_precision(vectors.dtype))


@jax.custom_vjp
def sum_of_sub_keys(coefficients: Coefficients, sub_key_ids: Ids, keys: SubKeys) -> Vectors:
    """Each token's weighted sum of the sub-keys that it chose."""
    num_subkeys, half = keys.shape[2:]
    if platform() == "cpu":
        rows = _rows(sub_key_ids, num_subkeys)
        sums = read_by_blocks(keys.reshape(-1, half), rows, coefficients.reshape(rows.shape))
        return sums.reshape(*sub_key_ids.shape[:3], half)
    dense = _one_hot_sum(coefficients, sub_key_ids, num_subkeys)
    return jnp.einsum("hpst,hpsk->thpk", dense, keys, precision=_precision(keys.dtype))


@jax.custom_vjp
def dots_of_sub_keys(vectors: Vectors, sub_key_ids: Ids, keys: SubKeys) -> Coefficients:
    """Inner products of each token's vector with the sub-keys that it chose."""
    num_subkeys, half = keys.shape[2:]
    if platform() == "cpu":
        rows = _rows(sub_key_ids, num_subkeys)
        dots = dot_by_blocks(keys.reshape(-1, half), rows, vectors.reshape(-1, half))
        return dots.reshape(sub_key_ids.shape)
    # A gather of sub-keys for each token would be larger than all products.
    every = jnp.einsum("thpk,hpsk->thps", vectors, keys, precision=_precision(keys.dtype))
    return jnp.take_along_axis(every, sub_key_ids, axis=-1)


def _precision(dtype):
    """Of products on this device: in three terms where the tensor cores multiply bfloat16.

    They do from compute capability 8.0 on; also where a program is compiled for an absent GPU.
    """
    if platform() != "gpu" or dtype == jnp.float64:
        return _FULL
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or capability is None:
        return _THREE_PRODUCTS
    major = str(capability).partition(".")[0]
    return _THREE_PRODUCTS if major.isdigit() and int(major) >= 8 else _FULL


def _add_forward(coefficients, sub_key_ids, vectors, num_subkeys):
    added = add_to_sub_keys(coefficients, sub_key_ids, vectors, num_subkeys)
    return added, (coefficients, sub_key_ids, vectors)


def _add_backward(num_subkeys, residuals, added_bar):
    coefficients, sub_key_ids, vectors = residuals
    coefficients_bar = dots_of_sub_keys(vectors, sub_key_ids, added_bar)
    return coefficients_bar, None, sum_of_sub_keys(coefficients, sub_key_ids, added_bar)


def _sum_forward(coefficients, sub_key_ids, keys):
    return sum_of_sub_keys(coefficients, sub_key_ids, keys), (coefficients, sub_key_ids, keys)


def _sum_backward(residuals, sums_bar):
    coefficients, sub_key_ids, keys = residuals
    keys_bar = add_to_sub_keys(coefficients, sub_key_ids, sums_bar, keys.shape[2])
    return dots_of_sub_keys(sums_bar, sub_key_ids, keys), None, keys_bar


def _dot_forward(vectors, sub_key_ids, keys):
    return dots_of_sub_keys(vectors, sub_key_ids, keys), (vectors, sub_key_ids, keys)


def _dot_backward(residuals, dots_bar):
    vectors, sub_key_ids, keys = residuals
    keys_bar = add_to_sub_keys(dots_bar, sub_key_ids, vectors, keys.shape[2])
    return sum_of_sub_keys(dots_bar, sub_key_ids, keys), None, keys_bar


add_to_sub_keys.defvjp(_add_forward, _add_backward)
sum_of_sub_keys.defvjp(_sum_forward, _sum_backward)
dots_of_sub_keys.defvjp(_dot_forward, _dot_backward)


def _rows(sub_key_ids: jax.Array, num_subkeys: int) -> jax.Array:
    """Ids in the sub-keys of all heads and codebooks laid end to end, `[tokens * heads * 2, k]`."""
    _, heads, _, top_k = sub_key_ids.shape
    # One table of all codebooks, so that one gather or scatter serves them all.
    codebooks = jnp.arange(2 * heads, dtype=sub_key_ids.dtype).reshape(1, heads, 2, 1)
    return (sub_key_ids + num_subkeys * codebooks).reshape(-1, top_k)


def _one_hot_sum(coefficients: jax.Array, sub_key_ids: jax.Array, num_subkeys: int) -> jax.Array:
    """Coefficients by sub-key, zero where it was not chosen, `[heads, 2, subkeys, tokens]`.

    Built by comparisons, because accelerators scatter single numbers one after the other.
    """
    coefficients, sub_key_ids = (jnp.moveaxis(x, 0, 3) for x in (coefficients, sub_key_ids))
    sub_keys = jnp.arange(num_subkeys, dtype=jnp.int32).reshape(1, 1, -1, 1)
    dense = jnp.zeros((), coefficients.dtype)
    # One place at a time, so that no reduction keeps XLA from fusing this with what follows.
    for place in range(sub_key_ids.shape[2]):
        same = sub_key_ids[:, :, place, None] == sub_keys
        dense = dense + jnp.where(same, coefficients[:, :, place, None], 0.0)
    return dense
