"""The best few of many scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.slots.keys.addressing import top_k_ids


@pytest.mark.parametrize(("choices", "k"), [(1, 1), (5, 3), (64, 8), (128, 8), (130, 8), (72, 2)])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_the_best_come_first_and_the_lower_among_equals(choices, k, ties):
    scores = np.random.default_rng(choices).normal(size=(2, 7, choices)).astype(np.float32)
    if ties:
        scores = np.round(scores)  # -0 among them, which equals 0.
    expected = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    found = jax.jit(top_k_ids, static_argnums=1)(np.swapaxes(scores, 1, 2), k)
    np.testing.assert_array_equal(np.swapaxes(found, 1, 2), expected)


@pytest.mark.thorough
def test_what_is_not_a_number_is_chosen_where_it_stands():
    """So that it shows in the result; a place outside the array would be read without a check."""
    scores = jnp.zeros((128, 1)).at[70].set(jnp.nan)
    np.testing.assert_array_equal(top_k_ids(scores, 3), [[70], [0], [1]])
    everything = top_k_ids(jnp.full((128, 2), jnp.nan), 8)
    np.testing.assert_array_equal(everything, jnp.tile(jnp.arange(8)[:, None], (1, 2)))
