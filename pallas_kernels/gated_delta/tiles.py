"""Operations on two-dimensional tiles inside kernels: products, masks, sums; for all devices.

A vector with one number per token of a chunk is a column `[chunk, 1]` or a row `[1, chunk]`.
"""

import jax
import jax.numpy as jnp

from fwpkm_jax.core.numerics import compute_dtype


def product(a: jax.Array, b: jax.Array, *, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two tiles, in float32 or float64.

    Float32 operands are multiplied at the highest precision. Two bfloat16 operands need one pass
    only, because their products are exact in float32.

    Args:
      a: a tile.
      b: another tile.
      contract: the axes of `a` and `b` to sum over.
    """
    exact = a.dtype == b.dtype == jnp.bfloat16
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.DEFAULT if exact else jax.lax.Precision.HIGHEST,
        preferred_element_type=compute_dtype(a.dtype),
    )


def as_column(row: jax.Array) -> jax.Array:
    """`[1, n]` as `[n, 1]`, by a masked sum: Pallas cannot transpose such a thin tile."""
    r, c = positions(row.shape[1])
    return row_sum(jnp.where(r == c, row, 0.0))


def as_row(column: jax.Array) -> jax.Array:
    """`[n, 1]` as `[1, n]`."""
    r, c = positions(column.shape[0])
    return column_sum(jnp.where(r == c, column, 0.0))


def positions(size: int) -> tuple[jax.Array, jax.Array]:
    """Row and column number of every entry of a square tile."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row, column


def mask(where: jax.Array, like: jax.Array) -> jax.Array:
    """1 where `where` is True, else 0, in the dtype of `like`."""
    return jnp.where(where, jnp.ones((), like.dtype), jnp.zeros((), like.dtype))


def wide(*arrays: jax.Array) -> list[jax.Array]:
    """Converts the arrays to the dtype of computation: float32, or float64 for float64 arrays."""
    return [x.astype(compute_dtype(x.dtype)) for x in arrays]


def row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)


def column_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=0, keepdims=True)
