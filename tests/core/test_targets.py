"""Write weights, shifted targets and the normalisation of values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.core.numerics import standardize
from fwpkm_jax.core.targets import shift_left, write_weights


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
@settings(max_examples=5)
@given(length=st.integers(4, 9), chunk_size=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_token_writes_if_its_target_is_real_and_in_its_chunk(
    lookahead, masked, length, chunk_size, seed
):
    rng = np.random.default_rng(seed)
    gate, mask = rng.uniform(size=(2, length)), rng.integers(0, 2, size=(2, length)).astype(float)
    real = mask if masked else np.ones_like(mask)
    write, paired = np.zeros_like(gate), np.zeros_like(gate)
    for b, t in np.ndindex(gate.shape):
        target = t + lookahead
        if target < length and target // chunk_size == t // chunk_size:
            paired[b, t] = 1
            write[b, t] = gate[b, t] * real[b, t] * real[b, target]
    actual = write_weights(
        jnp.asarray(gate),
        jnp.asarray(mask) if masked else None,
        chunk_size=chunk_size,
        lookahead=lookahead,
    )
    np.testing.assert_array_equal(actual.write, write)
    np.testing.assert_array_equal(actual.paired, paired)
    np.testing.assert_array_equal(actual.counted, real)


@pytest.mark.parametrize("lookahead", [0, 1, 3, 7])
def test_shifting_left_brings_later_tokens_and_zeros_behind_the_end(lookahead):
    x = np.arange(1, 21, dtype=np.float32).reshape(2, 5, 2)
    expected = np.zeros_like(x)
    for t in range(5 - lookahead):
        expected[:, t] = x[:, t + lookahead]
    np.testing.assert_array_equal(shift_left(jnp.asarray(x), lookahead), expected)


@pytest.mark.usefixtures("float64")
def test_standardizing_divides_by_the_unbiased_deviation():
    x = np.random.default_rng(0).normal(2.0, 3.0, size=(2, 4, 5))
    deviation = np.std(x, axis=-1, ddof=1, keepdims=True)
    expected = (x - x.mean(axis=-1, keepdims=True)) / (deviation + 1e-6)
    np.testing.assert_allclose(standardize(jnp.asarray(x)), expected, rtol=1e-12)


@pytest.mark.parametrize("number", [0.0, 3.0])
def test_standardizing_a_constant_vector_has_a_finite_result_and_gradient(number):
    x = jnp.full((4,), number, jnp.float32)
    gradient = jax.grad(lambda x: standardize(x)[0])(x)
    assert np.all(np.isfinite(standardize(x)))
    assert np.all(np.isfinite(gradient))
