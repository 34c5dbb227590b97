"""Inverses of unit lower triangular matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.recurrence.triangular import unit_lower_inverse


@pytest.mark.parametrize("size", [1, 2, 5, 16, 64])
def test_the_product_with_the_inverse_is_the_identity(size):
    with jax.enable_x64():
        lower = jax.random.normal(jax.random.key(size), (3, size, size), jnp.float64)
        lower = lower / np.sqrt(size)  # As well conditioned as a random matrix of one row.
        matrix = jnp.tril(lower, -1) + jnp.eye(size)[None]
        inverse = jax.jit(unit_lower_inverse)(lower)
        np.testing.assert_allclose(inverse, np.linalg.inv(matrix), rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_the_derivative_is_that_of_the_inverse():
    def by_library(lower):
        return jnp.linalg.inv(jnp.tril(lower, -1) + jnp.eye(6))

    with jax.enable_x64():
        lower = jax.random.normal(jax.random.key(0), (6, 6), jnp.float64)
        weight = jax.random.normal(jax.random.key(1), (6, 6), jnp.float64)
        ours = jax.grad(lambda x: jnp.sum(weight * unit_lower_inverse(x)))(lower)
        theirs = jax.grad(lambda x: jnp.sum(weight * by_library(x)))(lower)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
