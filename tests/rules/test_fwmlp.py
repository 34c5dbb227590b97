"""The fast SwiGLU against its update written out, its two targets, padding."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.streams import streaming
from fwpkm_jax.core.streams.flush import flush
from fwpkm_jax.core.streams.pending import Signals, init_pending
from fwpkm_jax.rules import FwMLP
from tests.rules.sampling import init_memory, sample_signals, to_sequence

pytestmark = pytest.mark.usefixtures("float64")
RULE = FwMLP(key_dim=3, value_dim=4, hidden_dim=5, learning_rate=0.3, weight_decay=0.02)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.thorough
@pytest.mark.parametrize(("loss", "clip"), [("squared", None), ("absolute", 0.004)])
def test_the_update_written_out(loss, clip):
    """The six gradients by the chain rule; weights are gates, the average runs over writers."""
    rule = dataclasses.replace(RULE, loss=loss, write_clip=clip)
    memory = init_memory(RULE, jnp.float64)
    memory = memory._replace(up_bias=memory.up_bias + 0.3, gate_bias=memory.gate_bias - 0.2)
    sequence = to_sequence(
        RULE, sample_signals(RULE, masked=True), chunk_size=10, dtype=jnp.float64
    )
    chunk = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sequence)
    step = jax.jit(rule.step)(memory, chunk)

    m = type(memory)(*map(np.asarray, memory))
    x, target, weight = (np.asarray(a) for a in (chunk.query[:, 0], chunk.target, chunk[2]))
    up, gate = x @ m.up_kernel + m.up_bias, x @ m.gate_kernel + m.gate_bias
    silu, s = gate * sigmoid(gate), sigmoid(gate)
    output = (up * silu) @ m.down_kernel + m.down_bias
    num_writers = np.count_nonzero(weight)
    assert 0 < num_writers < np.sum(np.asarray(chunk.counted))
    slope = 2 * (output - target) if loss == "squared" else np.sign(output - target)
    d_output = weight[:, None] * slope / (4 * num_writers)
    d_hidden = d_output @ m.down_kernel.T
    d_up, d_gate = d_hidden * silu, d_hidden * up * (s + gate * s * (1 - s))
    gradients = (
        *(x.T @ d_up, d_up.sum(0), x.T @ d_gate, d_gate.sum(0)),
        *((up * silu).T @ d_output, d_output.sum(0)),
    )
    np.testing.assert_allclose(step.output, output, rtol=1e-11)
    squares = 0.0
    for name, before, after, gradient in zip(m._fields, m, step.memory, gradients, strict=True):
        if clip is not None:
            assert np.any(np.abs(gradient) > clip)
            gradient = np.clip(gradient, -clip, clip)
        change = -0.3 * (gradient + 0.02 * before)
        np.testing.assert_allclose(after, before + change, rtol=1e-11, err_msg=name)
        squares += np.sum(change**2)
    np.testing.assert_allclose(step.info.update_norm, np.sqrt(squares), rtol=1e-11)


@pytest.mark.thorough
def test_padding_neither_dilutes_a_write_nor_decays_the_weights():
    """Right-padded sequences leave the memory that the same sequences leave without padding."""
    signals = sample_signals(RULE, length=6)
    padded = Signals(
        *(np.concatenate([x, np.zeros(x[:, :1].shape).repeat(9, 1)], axis=1) for x in signals)
    )
    run = jax.jit(functools.partial(RULE.run, chunk_size=5))
    memories = [
        run(
            init_memory(RULE, jnp.float64),
            to_sequence(RULE, x, chunk_size=5, dtype=jnp.float64),
        ).memory
        for x in (signals, padded)
    ]
    chex.assert_trees_all_close(*memories, rtol=1e-12)


def mean_of_neighbours(signals):
    value = np.asarray(signals.value)
    return (value[:, :-1] + value[:, 1:]) / 2


@pytest.mark.thorough
def test_the_mean_target_averages_two_neighbours():
    rule = dataclasses.replace(RULE, target="mean")
    signals = sample_signals(rule, length=7)
    sequence = rule.sequence(*map(jnp.asarray, signals[:2]), chunk_size=3)
    np.testing.assert_allclose(sequence.target[:, :-1], mean_of_neighbours(signals), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [pytest.param((7,), marks=pytest.mark.slow), (2, 1, 4)])
def test_a_stream_averages_the_same_neighbours(pieces):
    rule = dataclasses.replace(RULE, target="mean")
    signals = sample_signals(rule, length=7)
    value, averaged = np.asarray(signals.value), mean_of_neighbours(signals)

    # What a rule with `later` would be told to have the same targets.
    told = signals._replace(value=np.concatenate([value[:, :1], averaged], axis=1))

    @functools.partial(jax.jit, static_argnums=0)
    def streamed(this, memory, given):
        pending, first = None, 0
        memory, given = jax.tree.map(lambda x: x[None], (memory, given))
        for length in pieces:
            piece = jax.tree.map(lambda x: x[:, :, first : first + length], given)  # noqa: B023
            pending = pending or init_pending(piece, 5)
            memory, pending, *_ = streaming.push(this, memory, pending, piece, chunk_size=3)
            first += length
        return flush(this, memory, pending)[0]

    memory = init_memory(rule, jnp.float64)
    memories = [streamed(this, memory, x) for this, x in ((rule, signals), (RULE, told))]
    chex.assert_trees_all_close(*memories, rtol=1e-12)


def test_the_mean_target_averages_all_values_up_to_the_lookahead():
    rule = dataclasses.replace(RULE, target="mean", lookahead=2)
    signals = sample_signals(rule, length=7)
    target = rule.sequence(*map(jnp.asarray, signals[:2]), chunk_size=4).target
    value = np.asarray(signals.value)
    expected = (value[:, :-2] + value[:, 1:-1] + value[:, 2:]) / 3
    np.testing.assert_allclose(target[:, :-2], expected, rtol=1e-12)


def test_an_empty_layer_is_refused():
    with pytest.raises(ValueError, match="hidden_dim=0 is too small"):
        FwMLP(hidden_dim=0)


@pytest.mark.thorough
def test_every_product_is_in_full_precision_gradients_included():
    memory = init_memory(RULE, jnp.float32)
    chunk = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]),
        to_sequence(RULE, sample_signals(RULE), chunk_size=10, dtype=jnp.float32),
    )

    def loss(query):
        after = RULE.step(memory, chunk._replace(query=query)).memory
        return jnp.sum(RULE.read(after, chunk.query)[0])

    text = jax.jit(jax.grad(loss)).lower(chunk.query).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) > 10
    assert all("HIGHEST" in line for line in products)
