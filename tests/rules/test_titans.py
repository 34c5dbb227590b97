"""Titans' memory: its recurrence, its identities, and the parallel form."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.rules import TitansRule
from fwpkm_jax.rules.gradient import GradientChunk
from tests.rules.sampling import init_memory, sample_signals, to_sequence

pytestmark = pytest.mark.usefixtures("float64")
LENGTH = 8


def sequence_of(rule, *, length=LENGTH, seed=0) -> GradientChunk:
    """One sequence with step sizes and momenta of its own."""
    signals = sample_signals(rule, batch=1, length=length, seed=seed)
    rng = np.random.default_rng(seed + 1)
    sequence = to_sequence(rule, signals, chunk_size=length, dtype=jnp.float64)
    return sequence._replace(
        cut=None,  # No pair ends with a chunk, so that any chunk size may follow.
        rates=jnp.asarray(rng.uniform(0.05, 0.3, (1, length, 1))),
        momentum=jnp.asarray(rng.uniform(0.2, 0.9, (1, length))),
    )


def run(rule, memory, sequence, chunk_size):
    return jax.jit(lambda m, s: rule.run(m, s, chunk_size=chunk_size))(memory, sequence)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-10, atol=1e-12), actual, expected
    )


@pytest.mark.thorough("1")
@pytest.mark.parametrize("depth", [1, 3])
def test_chunks_of_one_token_are_the_papers_recurrence(depth):
    rule = replace(TitansRule.tiny(), depth=depth, momentum_order=1, forget=0.2)
    memory, sequence = init_memory(rule, jnp.float64), sequence_of(rule)
    out = run(rule, memory, sequence, 1)

    weights, surprise = memory.weights, jax.tree.map(jnp.zeros_like, memory.weights)
    key, query, target = sequence.key[0, :, 0], sequence.query[0, :, 0], sequence.target[0]
    rate, momentum = sequence.rates[0, :, 0] * sequence.write_weight[0], sequence.momentum[0]

    @jax.jit
    def token(weights, surprise, t):
        loss = lambda w: jnp.sum((rule.apply(w, key[t][None])[0] - target[t]) ** 2)  # noqa: E731
        gradient = jax.grad(loss)(weights)
        surprise = jax.tree.map(lambda s, g: momentum[t] * s - rate[t] * g, surprise, gradient)
        weights = jax.tree.map(lambda w, s: 0.8 * w + s, weights, surprise)
        return weights, surprise, rule.apply(weights, query[t][None])[0]

    for t in range(LENGTH):
        weights, surprise, read = token(weights, surprise, t)
        assert_close(out.output[0, t], read)
    assert_close(out.memory.weights, weights)
    assert_close(jax.tree.map(lambda x: x[0], out.memory.momentum), surprise)


@pytest.mark.thorough
def test_padding_leaves_weights_and_momentum_bit_for_bit():
    rule = replace(TitansRule.tiny(), momentum_order=1, forget=0.2)
    memory, sequence = init_memory(rule, jnp.float64), sequence_of(rule)
    memory = memory._replace(momentum=jax.tree.map(lambda x: x + 0.5, memory.momentum))
    nothing = np.zeros((1, LENGTH))
    padding = sequence._replace(write_weight=nothing, counted=nothing)
    jax.tree.map(np.testing.assert_array_equal, run(rule, memory, padding, LENGTH).memory, memory)


@pytest.mark.thorough
def test_a_matrix_without_momentum_takes_the_delta_rules_steps():
    rule = TitansRule(
        key_dim=3, value_dim=4, depth=1, residual_norm=False, momentum_order=0, forget=0.0
    )
    memory, sequence = init_memory(rule, jnp.float64), sequence_of(rule)
    out = run(rule, memory, sequence, 1)
    matrix = memory.weights.layers[0]
    for t in range(LENGTH):
        key, target = sequence.key[0, t, 0], sequence.target[0, t]
        # Without a factor of one half the gradient is twice the delta rule's.
        beta = 2 * sequence.rates[0, t, 0] * sequence.write_weight[0, t]
        matrix = matrix + beta * jnp.outer(key, target - key @ matrix)
    assert_close(out.memory.weights.layers[0], matrix)


@pytest.mark.thorough
def test_a_chunks_gradients_are_all_of_the_weights_it_began_with():
    rule = replace(TitansRule.tiny(), momentum_order=1, momentum=0.7, forget=0.1)
    memory = init_memory(rule, jnp.float64)
    sequence = sequence_of(rule)._replace(rates=None, momentum=None)
    out = run(rule, memory, sequence, LENGTH)
    key, target = sequence.key[0, :, 0], sequence.target[0]
    rate = rule.learning_rate * sequence.write_weight[0]

    def gradient(t):
        loss = lambda w: jnp.sum((rule.apply(w, key[t][None])[0] - target[t]) ** 2)  # noqa: E731
        return jax.grad(loss)(memory.weights)

    weights, surprise = memory.weights, jax.tree.map(jnp.zeros_like, memory.weights)
    for t, slope in enumerate(map(jax.jit(gradient), range(LENGTH))):
        surprise = jax.tree.map(lambda s, g, t=t: 0.7 * s - rate[t] * g, surprise, slope)
        weights = jax.tree.map(lambda w, s: 0.9 * w + s, weights, surprise)
    assert_close(out.memory.weights, weights)


@pytest.mark.thorough
def test_ttt_linear_written_out():
    """Gradients at a chunk's first weights, each token read after its own step; the norm stays."""
    rule = TitansRule(
        **{"key_dim": 4, "value_dim": 4, "depth": 1, "momentum_order": 0, "forget": 0.0},
        **{"bias": True, "write_norm": False},
    )
    memory, sequence = init_memory(rule, jnp.float64), sequence_of(rule)
    scale = jnp.asarray([0.1, -0.2, 0.3, 0.0])
    weights = memory.weights._replace(scale=scale, biases=(jnp.asarray([0.2, 0.0, -0.1, 0.3]),))
    out = run(rule, rule.start(weights), sequence, 4)

    first = jax.tree.map(lambda x: np.asarray(x)[0], sequence)
    query, key = first.query[:, 0], (first.query if first.key is None else first.key)[:, 0]
    value, matrix, bias = first.target, np.asarray(weights.layers[0]), np.asarray(weights.biases[0])
    gain = 1 + np.asarray(scale)

    def norm(y):
        y = y - y.mean()
        return y / np.sqrt(np.mean(y**2) + 1e-5), 1 / np.sqrt(np.mean(y**2) + 1e-5)

    for start in range(0, len(query), 4):
        before, bias_before = matrix.copy(), bias.copy()
        for t in range(start, min(start + 4, len(query))):
            unit, slope = norm(key[t] @ before + bias_before)
            d_unit = (key[t] + gain * unit - value[t]) * gain
            d_sum = slope * (d_unit - d_unit.mean() - unit * np.mean(d_unit * unit))
            step = 2 * first.rates[t, 0] * first.write_weight[t]
            matrix, bias = matrix - step * np.outer(key[t], d_sum), bias - step * d_sum
            expected = query[t] + gain * norm(query[t] @ matrix + bias)[0]
            np.testing.assert_allclose(out.output[0, t], expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(out.memory.weights.scale, scale)


@pytest.mark.slow
def test_several_tokens_of_one_write_are_one_step_of_their_sum():
    rule = replace(TitansRule.tiny(), write_size=4, momentum_order=0, forget=0.0)
    memory, sequence = init_memory(rule, jnp.float64), sequence_of(rule, length=7)
    out = run(rule, memory, sequence, 7)

    def loss(weights):
        errors = rule.apply(weights, sequence.key[0, :4, 0]) - sequence.target[0, :4]
        rates = sequence.rates[0, :4, 0] * sequence.write_weight[0, :4]
        return jnp.sum(rates * jnp.sum(errors**2, axis=-1))

    after = jax.tree.map(lambda w, g: w - g, memory.weights, jax.grad(loss)(memory.weights))
    assert_close(out.memory.weights, after)
    # The token that completes the write reads it; the last three are read and not written.
    query = sequence.query[0, :, 0]
    assert_close(out.output[0, :3], rule.apply(memory.weights, query[:3]))
    assert_close(out.output[0, 3:], rule.apply(after, query[3:]))


@pytest.mark.thorough
def test_a_bounded_gradient_keeps_its_direction_and_an_orthogonal_step_its_spaces():
    plain = replace(TitansRule.tiny(), momentum_order=0, forget=0.0, depth=1)
    memory, sequence = init_memory(plain, jnp.float64), sequence_of(plain, length=1)

    def step_of(rule):
        after = run(rule, memory, sequence, 1).memory.weights
        return np.asarray(after.layers[0] - memory.weights.layers[0])

    step = step_of(plain)
    bounded = step_of(replace(plain, max_gradient_norm=0.1))
    norm = np.linalg.norm(step)
    assert_close(np.linalg.norm(bounded), 0.05 * (1 + np.tanh(norm / 0.05)))
    assert_close(bounded / np.linalg.norm(bounded), step / norm)
    singular = np.linalg.svd(step_of(replace(plain, orthogonalize=True)), compute_uv=False)
    # A token's gradient has one direction but for the norm's; what there is comes near 1.
    assert 0.6 < singular[0] < 1.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 5}, "depth=5 must lie between 1 and 4"),
        ({"write_size": 0}, "write_size=0 is too small"),
        ({"momentum_order": -1}, "momentum_order=-1"),
        ({"key_dim": 3}, "keys of width 3 to values of width 4"),
    ],
)
def test_options_that_make_no_memory_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        replace(TitansRule.tiny(), **options)
