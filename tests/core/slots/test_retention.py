"""Writes that spare what slots hold, against plain loops and the plain write."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fwpkm_jax.core.slots.options.retention import (
    Retention,
    hardening_scale,
    init_history,
    relocation_scale,
    step_scales,
)
from fwpkm_jax.core.slots.values.table import slot_write
from fwpkm_jax.core.slots.write import ValueWrite

pytestmark = pytest.mark.usefixtures("float64")
SLOTS, VALUE, STEP = 9, 3, 4.0
WRITE = ValueWrite(step_size=STEP)
KEYS = jnp.zeros((1, 2, 3, 2))
# Slots 2 and 5 are read by many places, also twice by one token; 0, 7 and 8 by none. Slot 3 is
# read by a token alone that does not count.
IDS = np.array([[2, 5], [5, 5], [1, 2], [6, 5], [3, 3], [4, 2]])
COUNTED = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
OPTIONS = {
    "nothing": Retention(),
    "hardening": Retention(hardening=0.5),
    "relocation": Retention(relocation=1.0),
    "all": Retention(hardening=1.0, relocation=0.5),
}
WRITE_WEIGHT = np.array([1.0, 0.2, 0.5, 0.9, 1.0, 0.0])


def sample(seed):
    """Read weights and errors of one chunk; what does not count has no error."""
    rng = np.random.default_rng(seed)
    weights, errors = rng.uniform(size=IDS.shape), rng.normal(size=(len(IDS), VALUE))
    return weights, COUNTED[:, None] * errors


@functools.partial(jax.jit, static_argnames="retention")
def write(values, history, ids, weights, errors, *, retention):
    """The table and its history after one write."""
    tokens = {"counted": jnp.asarray(COUNTED)}
    scales, history = step_scales(
        history,
        ids,
        weights,
        **tokens,
        write_weight=jnp.asarray(WRITE_WEIGHT),
        retention=retention,
    )
    values = slot_write(values, ids, weights, errors, **tokens, write=WRITE, scales=scales)
    return values, history


class Loop:
    """Writes slot by slot, and remembers what they did."""

    def __init__(self, retention, values):
        self.retention, self.values, self.written = retention, values.copy(), np.zeros(len(values))

    def write(self, ids, weights, errors):
        yielding = (1 + self.written) ** -self.retention.relocation
        moved = np.sum(weights**2 * yielding[ids], axis=1) / np.sum(weights**2, axis=1)
        for slot in np.unique(ids[COUNTED == 1]):
            readers = np.argwhere((ids == slot) & (COUNTED == 1)[:, None])
            step = 0
            for t, p in readers:
                scale = yielding[slot] / moved[t]
                step = step - scale * STEP * weights[t, p] * errors[t] / len(readers)
            step = step / (1 + self.written[slot]) ** self.retention.hardening
            self.values[slot] += step
            self.written[slot] += max(WRITE_WEIGHT[t] for t, _ in readers)


@pytest.mark.parametrize("retention", OPTIONS.values(), ids=OPTIONS)
def test_writes_are_those_of_a_loop_over_slots(retention):
    values = np.random.default_rng(0).normal(size=(SLOTS, VALUE))
    history = init_history(retention, KEYS, jnp.asarray(values))
    ours, loop = jnp.asarray(values), Loop(retention, values)
    for chunk in range(4):
        inputs = (np.roll(IDS, chunk) % 8, *sample(chunk))
        ours, history = write(ours, history, *map(jnp.asarray, inputs), retention=retention)
        loop.write(*inputs)
        np.testing.assert_allclose(ours, loop.values, rtol=1e-12, atol=1e-14)
    if history.written is not None:
        np.testing.assert_array_equal(history.written, loop.written)


def test_without_an_option_it_is_the_plain_write():
    values = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, VALUE)))
    inputs = (jnp.asarray(IDS), *map(jnp.asarray, sample(1)))
    history = init_history(Retention(), KEYS, values)
    ours, history = write(values, history, *inputs, retention=Retention())
    plain = slot_write(values, *inputs, counted=jnp.asarray(COUNTED), write=WRITE)
    np.testing.assert_allclose(ours, plain, rtol=1e-12)
    assert not jax.tree.leaves(history)


@pytest.mark.parametrize("retention", OPTIONS.values(), ids=OPTIONS)
def test_slots_that_no_counted_token_reads_stay_bit_for_bit(retention):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, VALUE)))
    history = jax.tree.map(lambda x: x + 0.5, init_history(retention, KEYS, values))
    inputs = (jnp.asarray(IDS), *map(jnp.asarray, sample(1)))
    after = write(values, history, *inputs, retention=retention)
    untouched = np.setdiff1d(np.arange(SLOTS), IDS[COUNTED == 1])
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves((values, history)), strict=True):
        np.testing.assert_array_equal(new[untouched], old[untouched])


def test_gradients_are_those_of_finite_differences():
    retention = OPTIONS[
        "hardening"
    ]  # The scale of relocation reads the weights without a gradient.
    values = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, VALUE)))
    weights, errors = map(jnp.asarray, sample(1))

    def two_writes(values, weights, errors):
        values = jnp.asarray(values)
        history = init_history(retention, KEYS, values)
        for ids in (IDS, IDS[::-1] % 7):
            inputs = (jnp.asarray(ids), weights, errors)
            values, history = write(values, history, *inputs, retention=retention)
        return values

    check_grads(two_writes, (values, weights, errors), order=1, modes=["rev"], rtol=1e-6)


def test_a_hardening_slot_is_the_mean_of_what_was_written_in_full():
    """Steps of the whole error, each over one more than the writes before."""
    targets, value = np.random.default_rng(0).normal(size=5), 0.0
    for number, target in enumerate(targets):
        value += float(hardening_scale(jnp.asarray(float(number)), power=1.0)) * (target - value)
    np.testing.assert_allclose(value, targets.mean())


def test_relocation_moves_a_prediction_as_far_as_without_it():
    weights = jnp.asarray([[0.5, 0.5, 0.1], [0.2, 0.7, 0.1]])
    written = jnp.asarray([[0.0, 3.0, 1.0], [2.0, 2.0, 2.0]])
    scale = relocation_scale(weights, written, power=1.0)
    np.testing.assert_allclose(scale[0, 0] / scale[0], [1.0, 4.0, 2.0], rtol=1e-12)
    np.testing.assert_allclose(scale[1], 1.0, rtol=1e-12)
    moved = jnp.sum(weights**2 * scale, axis=1)
    np.testing.assert_allclose(moved, jnp.sum(weights**2, axis=1), rtol=1e-12)


@pytest.mark.parametrize(
    ("field", "value"), [("hardening", -0.5), ("relocation", float("nan")), ("replay", -1)]
)
def test_what_means_nothing_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        replace(Retention(), **{field: value})
