"""Slot reads and writes against plain loops and the gradient they are meant to be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fwpkm_jax.core.slots.values.table import slot_counts, slot_read, slot_write
from fwpkm_jax.core.slots.write import PLAIN, ValueWrite

SLOTS, VALUE = 9, 3
# Slots 2 and 5 are read by many places, also twice by one token; 0, 7 and 8 by none.
IDS = np.array([[2, 5], [5, 5], [1, 2], [6, 5], [3, 4], [4, 2]])
COUNTED = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
jitted_write = jax.jit(slot_write, static_argnames="write")


def sample(dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(SLOTS, VALUE)).astype(dtype)
    weights = rng.uniform(size=IDS.shape).astype(dtype)
    errors = rng.normal(size=(len(IDS), VALUE)).astype(dtype)
    return values, weights, errors


def write_by_loop(values, weights, errors, counted, *, step, rate=1.0, clip=np.inf, decay=0.0):
    gradient, counts = np.zeros_like(values), np.zeros(len(values))
    for t, place in np.ndindex(IDS.shape):
        counts[IDS[t, place]] += counted[t]
    for t, place in np.ndindex(IDS.shape):
        slot = IDS[t, place]
        gradient[slot] += step * weights[t, place] * errors[t] / max(counts[slot], 1)
    return values - rate * (np.clip(gradient, -clip, clip) + decay * values)


def run_write(values, weights, errors, counted, **options):
    arrays = [jnp.asarray(x) for x in (values, IDS, weights, errors)]
    write = ValueWrite(**options)
    return jitted_write(*arrays, counted=jnp.asarray(counted, values.dtype), write=write)


@pytest.mark.usefixtures("float64")
def test_a_read_is_the_weighted_sum_of_its_slots():
    values, weights, _ = sample()
    expected = np.zeros((len(IDS), VALUE))
    for t, place in np.ndindex(IDS.shape):
        expected[t] += weights[t, place] * values[IDS[t, place]]
    actual = jax.jit(slot_read)(*map(jnp.asarray, (values, IDS, weights)))
    np.testing.assert_allclose(actual, expected, rtol=1e-13)


def test_counts_are_those_of_the_counted_tokens():
    counts = slot_counts(jnp.asarray(IDS), jnp.asarray(COUNTED, jnp.float32), num_slots=SLOTS)
    expected = np.bincount(IDS[COUNTED == 1].ravel(), minlength=SLOTS)
    np.testing.assert_array_equal(counts, expected[IDS])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("options", "by_loop"),
    [
        ({}, {}),
        ({"learning_rate": 0.3}, {"rate": 0.3}),
        ({"clip": 0.5}, {"clip": 0.5}),
        ({"weight_decay": 0.1}, {"decay": 0.1}),
        (
            {"clip": 0.5, "weight_decay": 0.1, "learning_rate": 0.3},
            {"clip": 0.5, "decay": 0.1, "rate": 0.3},
        ),
    ],
    ids=["plain", "rate", "clip", "decay", "all"],
)
@pytest.mark.parametrize("counted", [np.ones(len(IDS)), COUNTED, np.zeros(len(IDS))])
def test_a_write_is_the_mean_step_of_each_slots_places(counted, options, by_loop):
    arrays = sample()
    actual = run_write(*arrays, counted, step_size=4.0, **options)
    expected = write_by_loop(*arrays, counted, step=4.0, **by_loop)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


def test_a_write_leaves_other_slots_bit_for_bit():
    values, weights, errors = sample(np.float32)
    after = np.asarray(run_write(values, weights, errors, COUNTED, step_size=4.0))
    untouched = np.setdiff1d(np.arange(SLOTS), IDS)
    np.testing.assert_array_equal(after[untouched], values[untouched])
    assert np.all(np.any(after[np.unique(IDS)] != values[np.unique(IDS)], axis=1))


@pytest.mark.usefixtures("float64")
def test_a_write_is_the_gradient_of_the_weighted_squared_error_over_each_slots_reads():
    values, weights, targets = sample()
    write_weights = jnp.asarray(np.random.default_rng(1).uniform(size=len(IDS)))
    ids, targets = jnp.asarray(IDS), jnp.asarray(targets)

    def loss(values):
        errors = slot_read(values, ids, jnp.asarray(weights)) - targets
        return 0.5 * jnp.sum(write_weights[:, None] * errors**2)

    counts = np.bincount(IDS.ravel(), minlength=SLOTS)
    expected = values - 4.0 / np.maximum(counts, 1)[:, None] * jax.grad(loss)(jnp.asarray(values))
    read = slot_read(jnp.asarray(values), ids, jnp.asarray(weights))
    errors = PLAIN.error(read, targets, write_weights[:, None])
    actual = run_write(values, weights, errors, np.ones(len(IDS)), step_size=4.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("clip", [None, 0.5])
def test_reads_and_writes_differentiate_like_finite_differences(clip):
    def write_then_read(values, weights, errors):
        after = run_write(values, weights, errors, COUNTED, step_size=4.0, clip=clip)
        return slot_read(after, jnp.asarray(IDS[::-1].copy()), jnp.asarray(weights))

    check_grads(write_then_read, tuple(map(jnp.asarray, sample())), order=1, modes=["rev"])
