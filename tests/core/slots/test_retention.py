"""Writes that spare what slots hold, against plain loops and the plain write."""

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
    protection_scale,
    relocation_scale,
    settle,
    special_slots,
    strength_scale,
    surprise_weights,
)
from fwpkm_jax.core.slots.values.grouping import group_slots
from fwpkm_jax.core.slots.values.step import retentive_write
from fwpkm_jax.core.slots.values.table import slot_write
from fwpkm_jax.core.slots.write import ValueWrite

pytestmark = pytest.mark.usefixtures("float64")
SLOTS, VALUE, STEP = 9, 3, 4.0
KEYS = jnp.zeros((1, 2, 3, 2))
# Slots 2 and 5 are read by many places, also twice by one token; 0, 7 and 8 by none. Slot 3 is
# read by a token alone that does not count.
IDS = np.array([[2, 5], [5, 5], [1, 2], [6, 5], [3, 3], [4, 2]])
COUNTED = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
OPTIONS = {
    "nothing": Retention(),
    "write_decay": Retention(write_decay=0.2),
    "momentum": Retention(momentum=0.5),
    "protection": Retention(protection=0.7),
    "strength": Retention(strength=2.0),
    "hardening": Retention(hardening=0.5),
    "relocation": Retention(relocation=1.0),
    "common": Retention(common=0.5),
    "consolidation": Retention(consolidation=0.3),
    "all": Retention(
        **{"write_decay": 0.2, "momentum": 0.5, "protection": 0.7, "consolidation": 0.6},
        **{"strength": 1.5, "hardening": 1.0, "relocation": 0.5, "common": 0.3},
    ),
}
WRITE_WEIGHT = np.array([1.0, 0.2, 0.5, 0.9, 1.0, 0.0])


def sample(seed):
    """Read weights and errors of one chunk; what does not count has no error."""
    rng = np.random.default_rng(seed)
    weights, errors = rng.uniform(size=IDS.shape), rng.normal(size=(len(IDS), VALUE))
    return weights, COUNTED[:, None] * errors


def write(retention, values, history, ids, weights, errors):
    return jax.jit(retentive_write, static_argnames=("write", "retention"))(
        *(values, history, ids, weights, errors),
        write_weight=jnp.asarray(WRITE_WEIGHT),
        counted=jnp.asarray(COUNTED),
        write=ValueWrite(step_size=STEP),
        retention=retention,
    )


class Loop:
    """Writes slot by slot, and remembers what they did."""

    def __init__(self, retention, values):
        self.retention, self.values, self.last = retention, values.copy(), np.zeros_like(values)
        self.lasting = values.copy()
        self.reads, self.strongest, self.written, self.chunks_read = np.zeros((4, len(values)))
        self.chunks = 0

    def write(self, ids, weights, errors):
        retention, mean = self.retention, self.reads.mean()
        readers = {
            slot: np.argwhere((ids == slot) & (COUNTED == 1)[:, None])
            for slot in np.unique(ids[COUNTED == 1])
        }
        score = {
            slot: len(places) * np.log((self.chunks + 1) / (self.chunks_read[slot] + 1))
            for slot, places in readers.items()
        }
        yielding = (1 + self.written) ** -retention.relocation
        moved = np.sum(weights**2 * yielding[ids], axis=1) / np.sum(weights**2, axis=1)
        bound = sorted(score.values())[int(retention.common * len(score))]
        for slot, places in readers.items():
            step = 0
            for t, p in places:
                most = max(WRITE_WEIGHT[t], self.strongest[slot])
                scale = (WRITE_WEIGHT[t] / most) ** retention.strength if most else 1.0
                scale = scale * yielding[slot] / moved[t]
                step = step - scale * STEP * weights[t, p] * errors[t] / len(places)
            if self.reads[slot] > mean:
                step = step * (mean / self.reads[slot]) ** retention.protection
            step = step / (1 + self.written[slot]) ** retention.hardening
            step = step * (score[slot] >= bound)
            self.last[slot] = step + retention.momentum * self.last[slot]
            before = self.lasting[slot] if retention.consolidation else self.values[slot]
            self.values[slot] = (1 - retention.write_decay) * before + self.last[slot]
            self.lasting[slot] += retention.consolidation * self.last[slot]
            self.reads[slot] += len(places)
            strongest = max(WRITE_WEIGHT[t] for t, _ in places)
            self.strongest[slot] = max(strongest, self.strongest[slot])
            self.written[slot] += strongest
            self.chunks_read[slot] += 1
        self.chunks += 1


@pytest.mark.parametrize("retention", OPTIONS.values(), ids=OPTIONS)
def test_writes_are_those_of_a_loop_over_slots(retention):
    values = np.random.default_rng(0).normal(size=(SLOTS, VALUE))
    history = init_history(retention, KEYS, jnp.asarray(values))
    ours, loop = jnp.asarray(values), Loop(retention, values)
    for chunk in range(4):
        inputs = (np.roll(IDS, chunk) % 8, *sample(chunk))
        if history.lasting is not None:
            ours = settle(ours, history.lasting, jnp.asarray(inputs[0]), jnp.asarray(COUNTED))
        ours, history = write(retention, ours, history, *map(jnp.asarray, inputs))
        loop.write(*inputs)
        np.testing.assert_allclose(ours, loop.values, rtol=1e-12, atol=1e-14)
    for table, expected in ((history.steps, loop.last), (history.lasting, loop.lasting)):
        if table is not None:
            np.testing.assert_allclose(table, expected, rtol=1e-12, atol=1e-14)
    for name in ("reads", "strongest", "written", "chunks_read", "chunks"):
        if getattr(history, name) is not None:
            np.testing.assert_array_equal(getattr(history, name), getattr(loop, name))


def test_without_an_option_it_is_the_plain_write():
    values = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, VALUE)))
    inputs = (jnp.asarray(IDS), *map(jnp.asarray, sample(1)))
    ours, history = write(Retention(), values, init_history(Retention(), KEYS, values), *inputs)
    plain = slot_write(
        values, *inputs, counted=jnp.asarray(COUNTED), write=ValueWrite(step_size=STEP)
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-12)
    assert not jax.tree.leaves(history)


@pytest.mark.parametrize("retention", OPTIONS.values(), ids=OPTIONS)
def test_slots_that_no_counted_token_reads_stay_bit_for_bit(retention):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, VALUE)))
    history = jax.tree.map(lambda x: x + 0.5, init_history(retention, KEYS, values))
    inputs = (jnp.asarray(IDS), *map(jnp.asarray, sample(1)))
    after = write(retention, values, history, *inputs)
    untouched = np.setdiff1d(np.arange(SLOTS), IDS[COUNTED == 1])
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves((values, history)), strict=True):
        if new.ndim:  # The number of chunks is not of a slot.
            np.testing.assert_array_equal(new[untouched], old[untouched])


def test_gradients_are_those_of_finite_differences():
    retention = replace(OPTIONS["all"], relocation=0.0)  # Its scale has no gradient.
    values = jnp.asarray(np.random.default_rng(0).normal(size=(SLOTS, VALUE)))
    weights, errors = map(jnp.asarray, sample(1))

    def two_writes(values, weights, errors):
        values = jnp.asarray(values)
        history = init_history(retention, KEYS, values)
        for ids in (IDS, IDS[::-1] % 7):
            values, history = write(retention, values, history, jnp.asarray(ids), weights, errors)
        return values, history.steps, history.lasting

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


def test_a_weaker_write_moves_less_than_what_wrote_a_slot_before_it():
    weight, strongest = jnp.asarray([1.0, 0.5, 0.5, 0.0]), jnp.asarray([0.5, 0.5, 1.0, 0.0])
    scale = strength_scale(weight, strongest, power=3.0)
    np.testing.assert_allclose(scale, [1.0, 1.0, 0.125, 1.0])


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


def test_slots_that_every_chunk_reads_are_left_out_first():
    ids = jnp.asarray([[0, 1], [0, 2], [3, 3]])
    groups = group_slots(ids, num_slots=5)
    counts = jnp.asarray([[2.0, 1.0], [2.0, 1.0], [2.0, 2.0]])
    # Slot 0 is in every chunk, 1 in half of them, 2 and 3 in none, and 3 is read twice.
    before = jnp.asarray([[8.0, 4.0], [8.0, 0.0], [0.0, 0.0]])
    for share, kept in {0.0: "0123", 0.25: "123", 0.5: "23", 0.75: "3", 1.0: ""}.items():
        found = special_slots(groups, counts, before, jnp.asarray(8.0), share)
        expected = [[str(slot) in kept for slot in row] for row in np.asarray(ids)]
        np.testing.assert_array_equal(found, np.asarray(expected, float))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("write_decay", 1.1),
        ("common", 1.5),
        ("strength", -1.0),
        ("hardening", -0.5),
        ("momentum", 1.0),
        ("surprise", -1.0),
        ("protection", float("nan")),
    ],
)
def test_what_means_nothing_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        replace(Retention(), **{field: value})
