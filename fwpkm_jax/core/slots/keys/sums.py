"""Sums over the sub-keys that tokens chose, a few out of many: linear in each argument.

A CPU moves the chosen rows, whose number does not depend on the number of sub-keys. Other devices
lay the coefficients out, mostly zeros, and multiply matrices. Both may be differentiated again.

A GPU's tensor cores have no float32 products. There each operand is the sum of two bfloat16 terms,
and three of their four products are added in float32. The fourth is below 2^-16 of the operands;
the results are within 5e-6 of their norm.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.slots.values.rows import add_by_blocks, dot_by_blocks, read_by_blocks

_FULL = jax.lax.Precision.HIGHEST
_THREE_PRODUCTS = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3


def sub_key_totals(
    coefficients: Float[Array, "tokens heads 2 top_k"],
    sub_key_ids: Int[Array, "tokens heads 2 top_k"],
    num_subkeys: int,
) -> Float[Array, "heads 2 subkeys"]:
    """The coefficients of each sub-key, summed over the tokens that chose it."""
    return _by_platform(_totals_by_numbers, _totals_by_products)(
        coefficients, sub_key_ids, num_subkeys
    )


def add_to_sub_keys(
    coefficients: Float[Array, "tokens heads 2 top_k"],
    sub_key_ids: Int[Array, "tokens heads 2 top_k"],
    vectors: Float[Array, "tokens heads 2 half"],
    num_subkeys: int,
) -> Float[Array, "heads 2 subkeys half"]:
    """Adds each token's vector, times a coefficient, to every sub-key that it chose."""
    return _add(coefficients, sub_key_ids, vectors, num_subkeys)


def sum_of_sub_keys(
    coefficients: Float[Array, "tokens heads 2 top_k"],
    sub_key_ids: Int[Array, "tokens heads 2 top_k"],
    keys: Float[Array, "heads 2 subkeys half"],
) -> Float[Array, "tokens heads 2 half"]:
    """Each token's weighted sum of the sub-keys that it chose."""
    return _sum(coefficients, sub_key_ids, keys)


def dots_of_sub_keys(
    vectors: Float[Array, "tokens heads 2 half"],
    sub_key_ids: Int[Array, "tokens heads 2 top_k"],
    keys: Float[Array, "heads 2 subkeys half"],
) -> Float[Array, "tokens heads 2 top_k"]:
    """Inner products of each token's vector with the sub-keys that it chose."""
    return _dot(vectors, sub_key_ids, keys)


def _totals_by_numbers(coefficients, sub_key_ids, num_subkeys):
    heads = coefficients.shape[1]
    totals = jnp.zeros((heads * 2 * num_subkeys,), coefficients.dtype)
    totals = totals.at[_rows(sub_key_ids, num_subkeys)].add(_flat(coefficients))
    return totals.reshape(heads, 2, num_subkeys)


def _totals_by_products(coefficients, sub_key_ids, num_subkeys, *, precision):
    del precision  # Of products; there are none.
    return _laid_out(coefficients, sub_key_ids, num_subkeys).sum(3)


def _add_by_rows(coefficients, sub_key_ids, vectors, num_subkeys):
    heads, half = vectors.shape[1], vectors.shape[3]
    table = jnp.zeros((heads * 2 * num_subkeys, half), vectors.dtype)
    rows = _rows(sub_key_ids, num_subkeys)
    table = add_by_blocks(table, rows, _flat(coefficients), vectors.reshape(-1, half))
    return table.reshape(heads, 2, num_subkeys, half)


def _add_by_products(coefficients, sub_key_ids, vectors, num_subkeys, *, precision):
    dense = _laid_out(coefficients, sub_key_ids, num_subkeys)
    return jnp.einsum("hpst,thpk->hpsk", dense, vectors, precision=precision)


def _sum_by_rows(coefficients, sub_key_ids, keys):
    num_subkeys, half = keys.shape[2:]
    rows = _rows(sub_key_ids, num_subkeys)
    sums = read_by_blocks(keys.reshape(-1, half), rows, _flat(coefficients))
    return sums.reshape(*sub_key_ids.shape[:3], half)


def _sum_by_products(coefficients, sub_key_ids, keys, *, precision):
    dense = _laid_out(coefficients, sub_key_ids, keys.shape[2])
    return jnp.einsum("hpst,hpsk->thpk", dense, keys, precision=precision)


def _dot_by_rows(vectors, sub_key_ids, keys):
    """Inner products of each token's vector with the sub-keys that it chose."""
    num_subkeys, half = keys.shape[2:]
    rows = _rows(sub_key_ids, num_subkeys)
    dots = dot_by_blocks(keys.reshape(-1, half), rows, vectors.reshape(-1, half))
    return dots.reshape(sub_key_ids.shape)


def _dot_by_products(vectors, sub_key_ids, keys, *, precision):
    everything = jnp.einsum("thpk,hpsk->thps", vectors, keys, precision=precision)
    return jnp.take_along_axis(everything, sub_key_ids, axis=-1)


def _by_platform(by_rows, by_products):
    """A function that runs one of two, by the device. A last `int` is the number of sub-keys.

    Args:
      by_rows: for a CPU.
      by_products: for other devices; takes the precision of its products.
    """

    def chosen(*arguments):
        arrays = [x for x in arguments if not isinstance(x, int)]
        number = [x for x in arguments if isinstance(x, int)]
        is_wide = any(x.dtype == jnp.float64 for x in arrays)
        on_gpu = _FULL if is_wide or not _has_bfloat16_products() else _THREE_PRODUCTS
        return jax.lax.platform_dependent(
            *arrays,
            cpu=lambda *arrays: by_rows(*arrays, *number),
            cuda=lambda *arrays: by_products(*arrays, *number, precision=on_gpu),
            default=lambda *arrays: by_products(*arrays, *number, precision=_FULL),
        )

    return chosen


def _has_bfloat16_products() -> bool:
    """Whether this GPU's tensor cores multiply bfloat16, from compute capability 8.0 on.

    True on other devices, where a program can only be compiled ahead of time for a newer GPU.
    """
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or capability is None:
        return True
    major = str(capability).partition(".")[0]
    return major.isdigit() and int(major) >= 8


# The cotangents of each function are computed by the other two, so derivatives of any order exist.
_add = jax.custom_vjp(_by_platform(_add_by_rows, _add_by_products), nondiff_argnums=(3,))
_sum = jax.custom_vjp(_by_platform(_sum_by_rows, _sum_by_products))
_dot = jax.custom_vjp(_by_platform(_dot_by_rows, _dot_by_products))


def _add_forward(coefficients, sub_key_ids, vectors, num_subkeys):
    added = _add(coefficients, sub_key_ids, vectors, num_subkeys)
    return added, (coefficients, sub_key_ids, vectors)


def _add_backward(num_subkeys, residuals, added_bar):
    del num_subkeys
    coefficients, sub_key_ids, vectors = residuals
    coefficients_bar = _dot(vectors, sub_key_ids, added_bar)
    return coefficients_bar, None, _sum(coefficients, sub_key_ids, added_bar)


def _sum_forward(coefficients, sub_key_ids, keys):
    return _sum(coefficients, sub_key_ids, keys), (coefficients, sub_key_ids, keys)


def _sum_backward(residuals, sums_bar):
    coefficients, sub_key_ids, keys = residuals
    keys_bar = _add(coefficients, sub_key_ids, sums_bar, keys.shape[2])
    return _dot(sums_bar, sub_key_ids, keys), None, keys_bar


def _dot_forward(vectors, sub_key_ids, keys):
    return _dot(vectors, sub_key_ids, keys), (vectors, sub_key_ids, keys)


def _dot_backward(residuals, dots_bar):
    vectors, sub_key_ids, keys = residuals
    keys_bar = _add(dots_bar, sub_key_ids, vectors, keys.shape[2])
    return _sum(dots_bar, sub_key_ids, keys), None, keys_bar


_add.defvjp(_add_forward, _add_backward)
_sum.defvjp(_sum_forward, _sum_backward)
_dot.defvjp(_dot_forward, _dot_backward)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _rows(sub_key_ids: jax.Array, num_subkeys: int) -> jax.Array:
    """Ids in the sub-keys of all heads and codebooks laid end to end, `[tokens * heads * 2, k]`."""
    heads = sub_key_ids.shape[1]
    codebooks = jnp.arange(2 * heads, dtype=sub_key_ids.dtype).reshape(1, heads, 2, 1)
    return _flat(sub_key_ids + num_subkeys * codebooks)


def _laid_out(coefficients: jax.Array, sub_key_ids: jax.Array, num_subkeys: int) -> jax.Array:
    """Coefficients by sub-key, zero where it was not chosen, `[heads, 2, subkeys, tokens]`.

    Built by comparisons, because accelerators scatter single numbers one after the other.
    """
    coefficients, sub_key_ids = (jnp.moveaxis(x, 0, 3) for x in (coefficients, sub_key_ids))
    sub_keys = jnp.arange(num_subkeys, dtype=jnp.int32).reshape(1, 1, -1, 1)
    laid_out = jnp.zeros((), coefficients.dtype)
    # One place at a time, so that no reduction keeps XLA from fusing this with what follows.
    for place in range(sub_key_ids.shape[2]):
        same = sub_key_ids[:, :, place, None] == sub_keys
        laid_out = laid_out + jnp.where(same, coefficients[:, :, place, None], 0.0)
    return laid_out
