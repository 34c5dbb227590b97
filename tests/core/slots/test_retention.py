"""Writes that spare what slots hold, against plain loops and the plain write."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fwpkm_jax.core.slots.retention import (
    Retention,
    init_history,
    protection_scale,
    retentive_write,
    surprise_weights,
)
from fwpkm_jax.core.slots.table import slot_write

pytestmark = pytest.mark.usefixtures("float64")
SLOTS, VALUE, STEP = 9, 3, 4.0
# Slots 2 and 5 are read by many places, also twice by one token; 0, 7 and 8 by none. Slot 3 is
# read by a token alone that does not count.
IDS = np.array([[2, 5], [5, 5], [1, 2], [6, 5], [3, 3], [4, 2]])
COUNTED = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
OPTIONS = {
    "nothing": Retention(),
    "write_decay": Retention(write_decay=0.2),
    "momentum": Retention(momentum=0.5),
    "protection": Retention(protection=0.7),
    "all": Retention(write_decay=0.2, momentum=0.5, protection=0.7),
}


def sample(seed):
    """Read weights and errors of one chunk; what does not count has no error."""
    rng = np.random.default_rng(seed)
    weights, errors = rng.uniform(size=IDS.shape), rng.normal(size=(len(IDS), VALUE))
    return weights, COUNTED[:, None] * errors


def write(retention, values, history, ids, weights, errors):
    return jax.jit(retentive_write, static_argnames=("step_size", "retention"))(
        *(values, history, ids, weights, errors),
        counted=jnp.asarray(COUNTED),
        step_size=STEP,
        retention=retention,
    )


def write_by_loop(retention, values, last, reads, ids, weights, errors):
    values, last, new_reads = values.copy(), last.copy(), reads.copy()
    for slot in np.unique(ids[COUNTED == 1]):
        places = np.argwhere((ids == slot) & (COUNTED == 1)[:, None])
        step = -STEP * sum(weights[t, p] * errors[t] for t, p in places) / len(places)
        if reads[slot] > reads.mean():
            step = step * (reads.mean() / reads[slot]) ** retention.protection
        last[slot] = step + retention.momentum * last[slot]
        values[slot] = (1 - retention.write_decay) * values[slot] + last[slot]
        new_reads[slot] += len(places)
    return values, last, new_reads


@pytest.mark.parametrize("retention", OPTIONS.values(), ids=OPTIONS)
def test_writes_are_those_of_a_loop_over_slots(retention):
    values = np.random.default_rng(0).normal(size=(SLOTS, VALUE))
    history = init_history(retention, jnp.asarray(values))
    ours, last, reads = jnp.asarray(values), np.zeros_like(values), np.zeros(SLOTS)
    for chunk in range(4):
        inputs = (np.roll(IDS, chunk) % 8, *sample(chunk))
        ours, history = write(retention, ours, history, *map(jnp.asarray, inputs))
        values, last, reads = write_by_loop(retention, values, last, reads, *inputs)
        np.testing.assert_allclose(ours, values, rtol=1e-12, atol=1e-14)
    if retention.momentum:
        np.testing.assert_allclose(history.steps, last, rtol=1e-12, atol=1e-14)
    if retention.protection:
        np.testing.assert_array_equal(history.reads, reads)


def test_without_an_option_it_is_the_plain_write():
    values = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, VALUE)))
    inputs = (jnp.asarray(IDS), *map(jnp.asarray, sample(1)))
    ours, history = write(Retention(), values, init_history(Retention(), values), *inputs)
    plain = slot_write(values, *inputs, counted=jnp.asarray(COUNTED), step_size=STEP)
    np.testing.assert_allclose(ours, plain, rtol=1e-12)
    assert not jax.tree.leaves(history)


@pytest.mark.parametrize("retention", OPTIONS.values(), ids=OPTIONS)
def test_slots_that_no_counted_token_reads_stay_bit_for_bit(retention):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, VALUE)))
    history = jax.tree.map(lambda x: x + 0.5, init_history(retention, values))
    inputs = (jnp.asarray(IDS), *map(jnp.asarray, sample(1)))
    after = write(retention, values, history, *inputs)
    untouched = np.setdiff1d(np.arange(SLOTS), IDS[COUNTED == 1])
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves((values, history)), strict=True):
        np.testing.assert_array_equal(new[untouched], old[untouched])


def test_gradients_are_those_of_finite_differences():
    retention = OPTIONS["all"]
    values = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, VALUE)))
    weights, errors = map(jnp.asarray, sample(1))

    def two_writes(values, weights, errors):
        values = jnp.asarray(values)
        history = init_history(retention, values)
        for ids in (IDS, IDS[::-1] % 7):
            values, history = write(retention, values, history, jnp.asarray(ids), weights, errors)
        return values, history.steps

    check_grads(two_writes, (values, weights, errors), order=1, modes=["rev"], rtol=1e-6)


def test_surprise_weighs_by_the_error_over_the_chunks_and_never_above_one():
    errors = jnp.asarray([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [60.0, 80.0]])
    written = jnp.asarray([1.0, 0.5, 0.5, 0.0])  # The last one's error is nobody's.
    rms = np.sqrt((25 + 0.5 * 1 + 0) / 2)
    np.testing.assert_allclose(
        surprise_weights(errors, written, power=2.0), [1.0, 1 / rms**2, 0.0, 1.0], rtol=1e-12
    )
    np.testing.assert_allclose(surprise_weights(errors, written, power=1.0)[1], 1 / rms)
    for quiet in (0.0 * errors, errors):
        np.testing.assert_array_equal(surprise_weights(quiet, written, power=0.0), 1.0)
    assert np.all(np.isfinite(surprise_weights(0.0 * errors, 0.0 * written, power=1.0)))


def test_protection_spares_slots_read_more_than_the_average():
    reads = jnp.asarray([0.0, 1.0, 2.0, 8.0])
    scale = protection_scale(reads, jnp.asarray(2.0), power=0.5)
    np.testing.assert_allclose(scale, [1.0, 1.0, 1.0, 0.5])
    np.testing.assert_array_equal(protection_scale(0 * reads, jnp.asarray(0.0), power=2.0), 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("write_decay", 1.1), ("momentum", 1.0), ("surprise", -1.0), ("protection", float("nan"))],
)
def test_what_means_nothing_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        replace(Retention(), **{field: value})
