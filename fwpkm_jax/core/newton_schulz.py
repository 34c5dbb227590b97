"""Matrices made nearly orthogonal by products alone."""

from collections.abc import Iterable

import jax.numpy as jnp
from jaxtyping import Array, Float


def frobenius_norm(x: Float[Array, "..."]) -> Float[Array, ""]:
    """The square root of the sum of squares; its gradient at 0 is 0 instead of infinite."""
    squares = jnp.sum(x**2)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)


def newton_schulz(
    x: Float[Array, "rows columns"], coefficients: Iterable[tuple[float, float, float]]
) -> Float[Array, "rows columns"]:
    """X <- a X + (b A + c A^2) X with A = X X^T, once for each (a, b, c).

    Args:
      x: of Frobenius norm at most 1.
      coefficients: of quintic polynomials that bring every singular value near 1.

    References: Jordan et al. 2024 (Muon).
    """
    rows, columns = x.shape
    if rows > columns:
        # The square is then the smaller of both.
        return newton_schulz(x.T, coefficients).T
    for a, b, c in coefficients:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x
