"""What every rule owes its callers, whatever it computes. Each registered rule is tested here."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.chunks import map_groups, scan_chunks
from fwpkm_jax.core.streams.streaming import Signals
from tests.rules.sampling import CHUNKED, INSTANCES, init_memory, sample_signals, to_sequence

pytestmark = pytest.mark.usefixtures("float64")
CHUNK, LENGTH, BATCH = 4, 10, 2  # Two full chunks and a short one.


@pytest.fixture(params=INSTANCES.values(), ids=INSTANCES)
def rule(request):
    return request.param


# An option of a rule that has no pass of its own would tell nothing new here.
registered = pytest.mark.parametrize("rule", [INSTANCES[name] for name in CHUNKED], ids=CHUNKED)


@functools.partial(jax.jit, static_argnums=0)
def run(rule, memory, sequence):
    return rule.run(memory, sequence, chunk_size=CHUNK)


def sample(rule, dtype=jnp.float64, **options):
    signals = sample_signals(rule, **{"batch": BATCH, "length": LENGTH} | options)
    return to_sequence(rule, signals, chunk_size=CHUNK, dtype=dtype)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_a_rule_is_a_frozen_hashable_value(rule):
    assert rule == dataclasses.replace(rule)
    assert hash(rule) == hash(dataclasses.replace(rule))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.value_dim = 1


def test_a_memory_starts_in_float32_and_depends_on_the_key_alone(rule):
    memory = rule.init(jax.random.key(3))
    chex.assert_type(jax.tree.leaves(memory), jnp.float32)
    assert_equal(memory, rule.init(jax.random.key(3)))


@pytest.mark.slow
@registered
def test_jit_equals_eager(rule):
    memory, sequence = init_memory(rule, jnp.float64), sample(rule, length=2, masked=True)
    chunk = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sequence)
    assert_close(rule.step(memory, chunk), jax.jit(rule.step)(memory, chunk))


@registered
def test_a_pass_is_the_scan_of_its_steps_gradients_included(rule):
    memory, sequence = init_memory(rule, jnp.float64), sample(rule, masked=True)
    direction = jnp.asarray(np.random.default_rng(1).normal(size=sequence.target.shape))

    def loss(pass_over, sequence):
        out = pass_over(memory, sequence)
        return jnp.sum(direction * out.output), out

    def scanned(memory, sequence):
        return scan_chunks(rule.step, memory, sequence, chunk_size=CHUNK)

    gradient = jax.jit(jax.grad(loss, argnums=1, has_aux=True), static_argnums=0)
    assert_close(gradient(functools.partial(run, rule), sequence), gradient(scanned, sequence))


def test_two_halves_equal_the_whole(rule):
    memory, sequence = init_memory(rule, jnp.float64), sample(rule, length=4 * CHUNK)
    whole = run(rule, memory, sequence)
    first, second = (
        jax.tree.map(lambda x, half=half: x[:, half], sequence)
        for half in (slice(2 * CHUNK), slice(2 * CHUNK, None))
    )
    early = run(rule, memory, first)
    late = run(rule, early.memory, second)
    assert_close(late.memory, whole.memory)
    assert_close(jnp.concatenate([early.output, late.output], axis=1), whole.output)


@pytest.mark.parametrize("start", [CHUNK, 2 * CHUNK])
def test_later_chunks_never_change_earlier_outputs(rule, start):
    memory, sequence = init_memory(rule, jnp.float64), sample(rule)
    changed = jax.tree.map(lambda x: x.at[:, start:].multiply(-1.5), sequence)
    before, after = (run(rule, memory, x) for x in (sequence, changed))
    assert_equal(after.output[:, :start], before.output[:, :start])
    assert np.all(np.any(after.output[:, start:] != before.output[:, start:], axis=-1))


def test_what_is_written_is_read_by_later_chunks(rule):
    memory, sequence = init_memory(rule, jnp.float64), sample(rule)
    changed = sequence._replace(target=sequence.target.at[:, 0].add(1))
    before, after = (run(rule, memory, x).output for x in (sequence, changed))
    assert np.max(np.abs(after[:, CHUNK:] - before[:, CHUNK:])) > 1e-4


def test_padding_writes_nothing_and_changes_no_token(rule):
    memory = init_memory(rule, jnp.float64)
    signals = sample_signals(rule, batch=BATCH, length=LENGTH, masked=True)
    padding = signals.mask == 0
    assert np.any(padding, axis=1).all()
    other = Signals(
        np.where(padding[..., None, None], -signals.query + 1, signals.query),
        np.where(padding[..., None], 7.0, signals.value),
        np.where(padding, 0.9, signals.gate),
        signals.mask,
    )
    one, two = (
        run(rule, memory, to_sequence(rule, x, chunk_size=CHUNK, dtype=jnp.float64))
        for x in (signals, other)
    )
    assert_equal(np.asarray(one.output)[~padding], np.asarray(two.output)[~padding])
    assert_equal(one.memory, two.memory)


def test_padding_alone_leaves_the_memory_bit_for_bit(rule):
    # Written before, so that whatever a memory carries along (momentum, writes' traces) is not 0.
    memory = run(rule, init_memory(rule, jnp.float64), sample(rule)).memory
    signals = sample_signals(rule, batch=BATCH, length=LENGTH)
    signals = signals._replace(mask=np.zeros_like(signals.mask))
    out = run(rule, memory, to_sequence(rule, signals, chunk_size=CHUNK, dtype=jnp.float64))
    assert_equal(out.memory, memory)
    chex.assert_tree_all_finite(out.info)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_memory_keeps_shape_and_dtype_whatever_the_tokens_are(rule, dtype):
    memory = rule.init(jax.random.key(0))
    out = run(rule, memory, sample(rule, dtype))
    chex.assert_trees_all_equal_shapes_and_dtypes(out.memory, memory)
    assert out.output.dtype == jnp.float32
    chex.assert_tree_all_finite(out)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradients_are_finite_and_reach_queries_targets_and_weights(rule, dtype):
    memory, sequence = rule.init(jax.random.key(0)), sample(rule, dtype, masked=True)

    @jax.jit
    @jax.grad
    def gradient(inputs):
        return jnp.sum(run(rule, memory, sequence._replace(**inputs)).output ** 2)

    inputs = {name: getattr(sequence, name) for name in ("query", "target", "write_weight")}
    for name, leaf in gradient(inputs).items():
        assert leaf.dtype == dtype
        assert np.all(np.isfinite(leaf)), name
        assert np.any(np.asarray(leaf) != 0), name


def test_groups_are_independent_and_equal_to_a_memory_alone(rule):
    memory = init_memory(rule, jnp.float64)
    groups = [sample(rule, seed=seed) for seed in range(3)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *groups)
    memories = jax.tree.map(lambda x: jnp.stack([x] * 3), memory)
    run_groups = jax.jit(lambda m, s: map_groups(functools.partial(run, rule), m, s))
    out = run_groups(memories, together)
    for index, group in enumerate(groups):
        alone = run(rule, memory, group)
        assert_close(jax.tree.map(lambda x, i=index: x[i], out), alone)
    changed = jax.tree.map(lambda x: x.at[1].multiply(-1.5), together)
    other = run_groups(memories, changed)
    for index in (0, 2):
        mine = lambda x, i=index: x[i]  # noqa: E731
        assert_equal(jax.tree.map(mine, other), jax.tree.map(mine, out))
    assert np.all(np.asarray(other.output[1]) != np.asarray(out.output[1]))


@registered
def test_one_group_is_the_memory_without_groups(rule):
    memory, sequence = init_memory(rule, jnp.float64), sample(rule)
    one = jax.tree.map(lambda x: x[None], (memory, sequence))
    out = jax.jit(lambda m, s: map_groups(functools.partial(run, rule), m, s))(*one)
    assert_close(jax.tree.map(lambda x: x[0], out), run(rule, memory, sequence))
