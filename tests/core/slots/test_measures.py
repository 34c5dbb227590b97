"""Collision, coverage, divergence and the gate's histogram, by hand."""

import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.slots.measures import access_measures


def test_by_hand():
    ids = jnp.asarray([[0, 1], [1, 1], [3, 5]])  # Slot 1 three times, 0, 3 and 5 once.
    measures = access_measures(ids, 8)
    np.testing.assert_allclose(measures.collision, 3 / 6)
    np.testing.assert_allclose(measures.coverage, 4 / 8)
    shares = np.array([3 / 6, 1 / 6, 1 / 6, 1 / 6])
    np.testing.assert_allclose(measures.kld, np.sum(shares * np.log(shares * 8)), rtol=1e-6)


def test_even_access_covers_everything_without_collision_or_divergence():
    measures = access_measures(jnp.arange(16).reshape(4, 4), 16)
    np.testing.assert_array_equal(measures, [0, 1, 0])


def test_a_single_slot_diverges_by_the_logarithm_of_their_number():
    measures = access_measures(jnp.full((5, 2), 3), 16)
    np.testing.assert_allclose(measures, [1, 1 / 16, np.log(16)], rtol=1e-6)
