"""Two-dimensional tiles inside kernels: products, masks, sums along an axis; for all devices.

A vector over a chunk's tokens is a column `[chunk, 1]` or a row `[1, chunk]`.
"""

import jax
import jax.numpy as jnp

from fwpkm_jax.core.precision import compute_dtype


def product(a: jax.Array, b: jax.Array, *, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Sums `a` over axis `contract[0]` against `b` over axis `contract[1]`, in at least float32.

    Float32 operands are multiplied at the highest precision; bfloat16 operands are exact in one
    pass, because their products fit float32.
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
    """`[1, n]` as `[n, 1]`, by a masked sum: a transpose of so thin a tile does not lower."""
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
    """Ones and zeros."""
    return jnp.where(where, jnp.ones((), like.dtype), jnp.zeros((), like.dtype))


def wide(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays in the dtype to compute in: float32, unless they are float64."""
    return [x.astype(compute_dtype(x.dtype)) for x in arrays]


def row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)


def column_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=0, keepdims=True)
