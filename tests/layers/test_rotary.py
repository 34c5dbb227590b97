"""Rotary embedding as complex rotation, and YaRN's published ramp."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.layers.rotary import YarnConfig, apply_rotary, rotary_frequencies


def sample(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def test_pairs_turn_as_complex_numbers_and_the_rest_stays():
    x, positions = sample(0, 2, 5, 3, 10), np.array([[0, 1, 2, 3, 4], [7, 8, 100, 5, 0]])
    frequencies = 100.0 ** (-np.arange(3) / 3)
    turned = (x[..., :3] + 1j * x[..., 3:6]) * np.exp(
        1j * positions[:, :, None, None] * frequencies
    )
    expected = np.concatenate([turned.real, turned.imag, x[..., 6:]], axis=-1)
    with jax.enable_x64(True):
        rotary = rotary_frequencies(6, theta=100.0)
        actual = apply_rotary(jnp.asarray(x), jnp.asarray(positions), rotary=rotary)
        assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    shift=st.integers(0, 5000),
    distance=st.integers(0, 5000),
    rotary_dim=st.sampled_from([2, 8, 16]),
    factor=st.sampled_from([None, 4.0, 64.0]),
)
def test_scores_depend_on_the_distance_alone(shift, distance, rotary_dim, factor):
    yarn = None if factor is None else YarnConfig(factor=factor)
    rotary = rotary_frequencies(rotary_dim, theta=10_000.0, scaling=yarn)
    query, key = sample(1, 1, 1, 1, 16), sample(2, 1, 1, 1, 16)

    def score(at):
        positions = jnp.full((1, 1), at + distance), jnp.full((1, 1), at)
        turned = [
            apply_rotary(jnp.asarray(x), p, rotary=rotary)
            for x, p in zip((query, key), positions, strict=True)
        ]
        return np.sum(np.asarray(turned[0]) * np.asarray(turned[1]))

    with jax.enable_x64(True):
        np.testing.assert_allclose(score(shift), score(0), rtol=1e-9, atol=1e-9)


def test_bfloat16_angles_are_taken_in_float32():
    # bfloat16 cannot tell position 1001 from 1000.
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    rotary = rotary_frequencies(4, theta=10_000.0)
    actual = apply_rotary(x, jnp.full((1, 1), 1001), rotary=rotary)
    expected = [
        math.cos(1001) - math.sin(1001),
        math.cos(10.01) - math.sin(10.01),
        math.cos(1001) + math.sin(1001),
        math.cos(10.01) + math.sin(10.01),
    ]
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(actual[0, 0, 0].astype(jnp.float32), expected, rtol=1e-2)


def test_yarn_with_factor_one_changes_nothing():
    plain = rotary_frequencies(16, theta=10_000.0)
    stretched = rotary_frequencies(16, theta=10_000.0, scaling=YarnConfig(factor=1.0))
    np.testing.assert_allclose(stretched.frequencies, plain.frequencies, rtol=1e-15)
    assert stretched.scale == plain.scale == 1


@pytest.mark.parametrize(("original_length", "start", "end"), [(1024, 1, 5), (4096, 2, 6)])
def test_yarn_ramp_has_the_published_bounds(original_length, start, end):
    """Indices 1 to 5 for the reference's original context of 1024, 2 to 6 for 4096."""
    plain = rotary_frequencies(16, theta=10_000.0)
    yarn = YarnConfig(factor=8.0, original_length=original_length)
    stretched = rotary_frequencies(16, theta=10_000.0, scaling=yarn)
    # 0: untouched, 1: divided by the factor.
    share = (1 - stretched.frequencies / plain.frequencies) / (1 - 1 / 8)
    expected = np.clip((np.arange(8) - start) / (end - start), 0, 1)
    np.testing.assert_allclose(share, expected, atol=1e-12)
    assert stretched.scale == pytest.approx(0.1 * math.log(8) + 1)


def test_yarn_scales_what_turns_and_nothing_else():
    rotary = rotary_frequencies(4, theta=10_000.0, scaling=YarnConfig(factor=4.0))
    x = jnp.asarray(sample(0, 1, 3, 2, 6), jnp.float32)
    turned = apply_rotary(x, jnp.asarray([[0, 5, 9]]), rotary=rotary)
    lengths = [np.linalg.norm(np.asarray(y)[..., :4], axis=-1) for y in (turned, x)]
    np.testing.assert_allclose(lengths[0], lengths[1] * (0.1 * math.log(4) + 1), rtol=1e-5)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0.5}, "factor=0.5"),
        ({"factor": 2.0, "original_length": 0}, "original_length=0"),
        ({"factor": 2.0, "beta_fast": 1.0}, "beta_slow=1.0"),
    ],
)
def test_impossible_yarn_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        YarnConfig(**options)


def test_impossible_widths_are_refused():
    with pytest.raises(ValueError, match="rotary_dim=3"):
        rotary_frequencies(3, theta=10_000.0)
    rotary = rotary_frequencies(8, theta=10_000.0)
    with pytest.raises(ValueError, match="only 4"):
        apply_rotary(jnp.ones((1, 1, 1, 4)), jnp.zeros((1, 1), int), rotary=rotary)
