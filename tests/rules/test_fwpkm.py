"""The product-key memory's rule against plain loops, and its options against closed forms."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.core.chunks import Chunk
from fwpkm_jax.core.slots.keys.addressing import product_top_k
from fwpkm_jax.core.slots.write import addressing_loss
from fwpkm_jax.rules.fwpkm import FwPKM, FwPKMMemory
from tests.golden.own import oracle
from tests.rules.sampling import init_memory, sample_signals, to_sequence

pytestmark = pytest.mark.usefixtures("float64")
CASES = {
    "idw": oracle.Settings(
        num_subkeys=4, num_heads=2, top_k=3, lookahead=1, score="idw", chunk_size=3
    ),
    "dot": oracle.Settings(
        num_subkeys=4, num_heads=1, top_k=2, lookahead=2, score="dot", chunk_size=3
    ),
}
SHAPE = {"batch": 2, "length": 7}


@functools.partial(jax.jit, static_argnums=0)
def run(case, inputs):
    """The rule's pass over the arrays that the plain loops take."""
    settings = CASES[case]
    rule = FwPKM(
        num_subkeys=settings.num_subkeys,
        key_dim=inputs.query.shape[-1],
        value_dim=inputs.value.shape[-1],
        num_heads=settings.num_heads,
        top_k=settings.top_k,
        lookahead=settings.lookahead,
        score=settings.score,
    )
    chunk_size = settings.chunk_size
    sequence = rule.sequence(
        inputs.query, inputs.value, gate=inputs.gate, mask=inputs.mask, chunk_size=chunk_size
    )
    return rule.run(FwPKMMemory(inputs.keys, inputs.values), sequence, chunk_size=chunk_size)


def sample(case, seed, *, masked):
    return oracle.sample(CASES[case], seed=seed, masked=masked, **SHAPE)


def on_device(inputs):
    return oracle.Inputs(*map(jnp.asarray, inputs))


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8)
@given(seed=st.integers(0, 999), masked=st.booleans())
def test_a_pass_equals_the_plain_loops(case, seed, masked):
    inputs = sample(case, seed, masked=masked)
    expected = oracle.run(inputs, CASES[case])
    out = run(case, on_device(inputs))
    np.testing.assert_array_equal(out.access.slot_ids, expected.slot_ids)
    tolerance = {"rtol": 1e-9, "atol": 1e-11}
    np.testing.assert_allclose(out.access.slot_weights, expected.slot_weights, **tolerance)
    np.testing.assert_allclose(out.output, expected.output, **tolerance)
    np.testing.assert_allclose(out.info.addressing_loss, expected.addressing_loss[0], **tolerance)
    np.testing.assert_allclose(out.memory.keys, expected.keys[0], **tolerance)
    np.testing.assert_allclose(out.memory.values, expected.values[0], **tolerance)


@pytest.mark.thorough("idw-query")
@pytest.mark.slow_cases("dot-query", "dot-gate")
@pytest.mark.parametrize("field", ["query", "value", "gate"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_through_the_writes_are_finite_differences_of_the_plain_loops(case, field):
    inputs = sample(case, 3, masked=True)
    rng = np.random.default_rng(1)
    direction = rng.normal(size=getattr(inputs, field).shape)
    cotangent = rng.normal(size=inputs.value.shape)
    # Outputs of the first chunk do not depend on any write.
    cotangent[:, : CASES[case].chunk_size] = 0

    def by_loop(step):
        stepped = getattr(inputs, field) + step * direction
        got = oracle.run(inputs._replace(**{field: stepped}), CASES[case])
        return np.sum(cotangent * got.output), got.slot_ids

    h = 3e-5
    (a, ids), (b, _), (c, _), (d, same) = (by_loop(k * h) for k in (-2, -1, 1, 2))
    np.testing.assert_array_equal(ids, same)  # Else the function jumps between the steps.
    expected = (a - 8 * b + 8 * c - d) / (12 * h)
    assert abs(expected) > 1e-3

    def loss(array):
        out = run(case, on_device(inputs)._replace(**{field: array}))
        return jnp.sum(jnp.asarray(cotangent) * out.output)

    gradient = jax.grad(loss)(jnp.asarray(getattr(inputs, field)))
    np.testing.assert_allclose(np.sum(direction * gradient), expected, rtol=1e-6)


def one_chunk(rule, *, masked=True, seed=0):
    """A chunk of tokens with its pairing, and a memory."""
    signals = sample_signals(rule, batch=2, length=5, seed=seed, masked=masked)
    sequence = to_sequence(rule, signals, chunk_size=5, dtype=jnp.float64)
    chunk = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sequence)
    return init_memory(rule, jnp.float64), chunk


def automatic_step(rule, memory, chunk):
    """The step by `jax.grad` of the two losses, dense."""

    def weight_and_losses(memory):
        output, _ = rule.read(memory, chunk.query)
        return chunk.write_weight, jnp.mean((output - chunk.target) ** 2, axis=-1)

    def half_sum(values):
        weight, losses = weight_and_losses(memory._replace(values=values))
        return 0.5 * rule.value_dim * jnp.sum(weight * losses)

    def half_mean(keys):
        weight, losses = weight_and_losses(memory._replace(keys=keys))
        return 0.5 * jnp.sum(weight * losses) / jnp.sum(chunk.paired)

    def entropy(keys):
        address = product_top_k(chunk.query, keys, top_k=rule.top_k, score=rule.score)
        return rule.addressing_weight * addressing_loss(
            address, num_subkeys=rule.num_subkeys, token_weights=chunk.addressed
        )

    _, access = rule.read(memory, chunk.query)
    reads = jnp.zeros(rule.num_slots).at[access.slot_ids].add(chunk.counted[:, None])
    step = rule.num_heads * rule.top_k if rule.value_step is None else rule.value_step
    d_values = (step / jnp.maximum(reads, 1))[:, None] * jax.grad(half_sum)(memory.values)
    losses = {"addressing": [entropy], "reconstruction": [half_mean], "both": [entropy, half_mean]}
    d_keys = sum(jax.grad(loss)(memory.keys) for loss in losses[rule.key_loss])

    def apply(fast, gradient):
        if rule.write_clip is not None:
            gradient = jnp.clip(gradient, -rule.write_clip, rule.write_clip)
        return fast - rule.learning_rate * (gradient + rule.weight_decay * fast)

    return apply(memory.keys, d_keys), apply(memory.values, d_values)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": "dot"},
        {"learning_rate": 0.3, "value_step": 2.5, "addressing_weight": 3.0},
        {"write_clip": 0.05},
        {"weight_decay": 0.1, "learning_rate": 0.3},
        {"key_loss": "reconstruction"},
        {"key_loss": "both", "temperature": 0.5},
        {"nonlinearity": "silu", "key_loss": "both"},
        {"nonlinearity": "relu", "score": "dot"},
    ],
    ids=str,
)
def test_the_written_out_step_is_the_gradient_of_its_losses(options):
    rule = dataclasses.replace(FwPKM.tiny(), **options)
    memory, chunk = one_chunk(rule)
    step = jax.jit(rule.step)(memory, chunk)
    keys, values = jax.jit(automatic_step, static_argnums=0)(rule, memory, chunk)
    np.testing.assert_allclose(step.memory.keys, keys, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(step.memory.values, values, rtol=1e-9, atol=1e-11)
    assert np.any(keys != memory.keys)
    assert np.any(values != memory.values)


@pytest.mark.thorough
def test_a_factor_scales_the_value_step_alone():
    rule = FwPKM.tiny()
    memory, chunk = one_chunk(rule)
    step = jax.jit(rule.step)
    plain = step(memory, chunk)
    halved = step(memory, chunk._replace(factor=jnp.full_like(chunk.write_weight, 0.5)))
    np.testing.assert_array_equal(halved.memory.keys, plain.memory.keys)
    np.testing.assert_allclose(
        halved.memory.values - memory.values,
        0.5 * (plain.memory.values - memory.values),
        atol=1e-14,
    )


@pytest.mark.thorough
def test_inner_steps_write_a_chunk_again_and_move_its_keys_once():
    rule = FwPKM.tiny()
    memory, chunk = one_chunk(rule)
    repeating = jax.jit(dataclasses.replace(rule, inner_steps=3).step)(memory, chunk)
    once = jax.jit(rule.step)(memory, chunk)
    after, squares = once.memory.values, once.info.update_norm**2
    for _ in range(2):
        again = jax.jit(rule.step)(memory._replace(values=after), chunk)
        after, squares = again.memory.values, squares + again.info.update_norm**2
    np.testing.assert_allclose(repeating.memory.values, after, rtol=1e-10)
    np.testing.assert_array_equal(repeating.memory.keys, once.memory.keys)
    np.testing.assert_array_equal(repeating.output, once.output)
    np.testing.assert_allclose(repeating.info.update_norm**2, squares, rtol=1e-10)


@pytest.mark.thorough("1")
@pytest.mark.parametrize("length", [1, 2])
def test_a_chunk_without_any_target_moves_the_keys_alone(length):
    rule = dataclasses.replace(FwPKM.tiny(), lookahead=2)
    signals = sample_signals(rule, batch=2, length=length)
    sequence = to_sequence(rule, signals, chunk_size=4, dtype=jnp.float64)
    memory = init_memory(rule, jnp.float64)
    after = jax.jit(functools.partial(rule.run, chunk_size=4))(memory, sequence).memory
    np.testing.assert_array_equal(after.values, memory.values)
    assert np.any(after.keys != memory.keys)


@pytest.mark.thorough
def test_the_written_change_is_measured():
    rule = FwPKM.tiny()
    memory, chunk = one_chunk(rule)
    step = jax.jit(rule.step)(memory, chunk)
    change = np.linalg.norm(step.memory.values - memory.values)
    np.testing.assert_allclose(step.info.update_norm, change, rtol=1e-10)


def test_initial_keys_are_uniform_and_values_normal():
    rule = FwPKM(num_subkeys=64, key_dim=16, value_dim=25, num_heads=2, top_k=1)
    memory = rule.init(jax.random.key(0))
    assert memory.keys.shape == (2, 2, 64, 8)
    assert memory.values.shape == (64**2, 25)
    bound = 1 / 4
    assert np.max(np.abs(memory.keys)) <= bound
    np.testing.assert_allclose(np.mean(memory.keys), 0, atol=0.02)
    np.testing.assert_allclose(np.var(memory.keys), bound**2 / 3, rtol=0.1)
    np.testing.assert_allclose(np.mean(memory.values), 0, atol=0.01)
    np.testing.assert_allclose(np.std(memory.values), 1 / 5, rtol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_dim": 5}, "key_dim=5 must be even"),
        ({"key_dim": 0}, "key_dim=0 must be even"),
        ({"top_k": 6}, "top_k=6 must lie between 1 and num_subkeys=5"),
        ({"top_k": 0}, "top_k=0 must lie between 1 and num_subkeys=5"),
        ({"num_heads": 0}, "num_heads=0 is too small; use 1"),
        ({"value_dim": 1}, "value_dim=1 is too small; use 2"),
        ({"lookahead": -1}, "lookahead=-1 is too small; use 0"),
        ({"inner_steps": 0}, "inner_steps=0 is too small; use 1"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FwPKM.tiny(), **options)


def test_a_chunk_without_the_fields_of_a_slot_chunk_is_refused():
    rule = FwPKM.tiny()
    zeros = jnp.zeros((3,))
    plain = Chunk(jnp.zeros((3, 2, 6)), jnp.zeros((3, 4)), zeros, zeros, zeros)
    step = inspect.unwrap(FwPKM.step)  # Without the tests' own check of types.
    with pytest.raises(ValueError, match=r"Chunk has no field addressed, .* by its `chunk`"):
        step(rule, rule.init(jax.random.key(0)), plain)
