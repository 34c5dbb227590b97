"""Vectors brought to a length or spread."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.numerics import l2_normalize, layer_normalize, rms_normalize

EPS = 1e-3
NORMALIZERS = {
    "l2": (l2_normalize, lambda x: np.sqrt(np.sum(x**2) + EPS), 0.0),
    "rms": (rms_normalize, lambda x: np.sqrt(np.mean(x**2) + EPS), 0.0),
    "layer": (layer_normalize, lambda x: np.sqrt(np.var(x) + EPS), 1.0),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", NORMALIZERS)
def test_each_vector_is_divided_by_its_own_size(name):
    normalize, size, centred = NORMALIZERS[name]
    x = np.random.default_rng(0).normal(2.0, 1.5, size=(2, 3, 4))
    for index in np.ndindex(2, 3):
        expected = (x[index] - centred * x[index].mean()) / size(x[index])
        actual = normalize(jnp.asarray(x), eps=EPS)[index]
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("number", [0.0, 3.0])
def test_a_constant_vector_has_a_finite_result_and_gradient(name, number):
    normalize = functools.partial(NORMALIZERS[name][0], eps=EPS)
    x = jnp.full((4,), number, jnp.float32)
    assert np.all(np.isfinite(normalize(x)))
    assert np.all(np.isfinite(jax.grad(lambda x: normalize(x)[0])(x)))


@pytest.mark.parametrize("name", NORMALIZERS)
def test_half_precision_is_computed_in_single(name):
    assert NORMALIZERS[name][0](jnp.zeros((1, 4), jnp.bfloat16), eps=EPS).dtype == jnp.float32
