"""LaCT's step against its loss, the rows' norms, orthogonal steps, padding."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.rules.gradient import GradientChunk
from fwpkm_jax.rules.lact import LaCTRule, SwiGLUWeights
from tests.rules.sampling import init_memory

pytestmark = pytest.mark.usefixtures("float64")
RULE = LaCTRule(key_dim=3, value_dim=4, hidden_dim=5)
TOKENS = 6


def sample(*, rates=0.5, seed=0):
    """One chunk; its last two tokens do not write."""
    rng = np.random.default_rng(seed)
    ones = jnp.ones(TOKENS, jnp.float64)
    weight = jnp.asarray([0.5, 1, 1, 0.3, 0, 0], jnp.float64)
    return GradientChunk(
        jnp.asarray(rng.normal(size=(TOKENS, 1, 3))),
        jnp.asarray(rng.normal(size=(TOKENS, 4))),
        weight,
        ones,
        (weight != 0).astype(jnp.float64),
        key=jnp.asarray(rng.normal(size=(TOKENS, 1, 3))),
        rates=jnp.asarray(rng.uniform(0, rates, size=(TOKENS, 3))),
        momentum=jnp.asarray(rng.uniform(size=TOKENS)),
    )


def assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-11, atol=1e-13)


def norms(weights):
    return [np.linalg.norm(np.asarray(w), axis=1) for w in weights]


@jax.jit
def steps(memory, *chunks):
    """The first state and those after each chunk."""
    states = [memory]
    for chunk in chunks:
        states.append(RULE.step(states[-1], chunk).memory)
    return states


@pytest.mark.thorough
def test_a_step_is_minus_the_gradient_of_the_loss_by_each_tensors_rates():
    memory, chunk = init_memory(RULE, jnp.float64), sample()

    def loss(weights, index):
        gate, down, up = weights
        keys = chunk.key[:, 0]
        reads = (jax.nn.silu(keys @ gate.T) * (keys @ up.T)) @ down.T
        rates = chunk.rates[:, index] * chunk.write_weight
        return -jnp.sum(rates * jnp.sum(reads * chunk.target, axis=-1))

    expected = [-jax.grad(loss)(memory.weights, index)[index] for index in range(3)]
    assert_close(RULE.descent(memory, chunk), SwiGLUWeights(*expected))
    read = RULE.read(memory, chunk.key)
    gate, down, up = memory.weights
    keys = chunk.key[:, 0]
    assert_close(read, (jax.nn.silu(keys @ gate.T) * (keys @ up.T)) @ down.T)


@pytest.mark.slow
def test_momentum_keeps_the_mean_share_over_the_counted_tokens():
    first, second = sample(seed=1), sample(seed=2)
    start, after, last = steps(init_memory(RULE, jnp.float64), first, second)
    share = np.mean(np.asarray(second.momentum[:4]))
    expected = jax.tree.map(
        lambda new, old: new + share * old, RULE.descent(after, second), RULE.descent(start, first)
    )
    assert_close(last.momentum, expected)


@pytest.mark.thorough
def test_a_chunk_of_padding_leaves_the_memory_bit_for_bit():
    zeros = jnp.zeros(TOKENS, jnp.float64)
    padding = sample(seed=2)._replace(write_weight=zeros, counted=zeros, paired=zeros)
    _, written, after = steps(init_memory(RULE, jnp.float64), sample(seed=1), padding)
    chex.assert_trees_all_equal(after, written)


@pytest.mark.thorough
def test_weights_keep_the_norms_of_their_rows():
    start, *_, last = steps(init_memory(RULE, jnp.float64), *(sample(seed=s) for s in range(3)))
    assert np.max(np.abs(last.weights.gate - start.weights.gate)) > 0.1
    for before, after in zip(norms(start.weights), norms(last.weights), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4)


@pytest.mark.thorough
def test_before_normalisation_steps_add_up():
    rule = dataclasses.replace(RULE, pre_norm=True)
    memory = rule.start(init_memory(rule, jnp.float64).weights)
    total = memory.weights
    for seed in range(3):
        after = rule.step(memory, sample(seed=seed)).memory
        total = jax.tree.map(jnp.add, total, after.momentum)
        memory = after
    assert_close(memory.accumulated, total)
    for row, start in zip(norms(memory.weights), memory.row_norms, strict=True):
        np.testing.assert_allclose(row, start, rtol=1e-4)
    ratio = np.asarray(memory.weights.up / memory.accumulated.up)
    np.testing.assert_allclose(ratio, ratio[:, :1] * np.ones((1, 3)), rtol=1e-9)


@pytest.mark.thorough
def test_muon_adds_steps_with_singular_values_near_1():
    rule = dataclasses.replace(RULE, muon=True, pre_norm=True)
    memory = init_memory(rule, jnp.float64)
    after = rule.step(memory, sample()).memory
    step = jax.tree.map(jnp.subtract, after.accumulated, memory.accumulated)
    for orthogonal, change in zip(step, after.momentum, strict=True):
        values = np.linalg.svd(np.asarray(change), compute_uv=False)
        # Five iterations raise only what was not too small.
        large = np.count_nonzero(values > 0.1 * np.linalg.norm(values))
        assert large >= 2
        near_1 = np.linalg.svd(np.asarray(orthogonal), compute_uv=False)[:large]
        np.testing.assert_allclose(near_1, 1, atol=0.15)
    assert_close(after.momentum, RULE.descent(memory, sample()))


@pytest.mark.thorough
def test_muon_of_nothing_has_a_finite_gradient():
    rule = dataclasses.replace(RULE, muon=True)
    memory, chunk = init_memory(rule, jnp.float64), sample()
    idle = chunk._replace(write_weight=jnp.zeros(TOKENS, jnp.float64))

    def total(rates):
        after = rule.step(memory, idle._replace(rates=rates)).memory
        return jnp.sum(rule.read(after, chunk.query))

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(chunk.rates), 0)
