"""Fast Weight Layers: the gradient steps they are defined by, and their streams."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.fast_weight_layer import FastWeightLayer, FastWeightLayerConfig, HeadTensors

pytestmark = pytest.mark.usefixtures("float64")
MODEL, VOCAB, BATCH, LENGTH = 4, 7, 2, 9
CONFIG = FastWeightLayerConfig(hidden_dim=6, chunk_size=4, initial_rate=0.3)


def make(config=CONFIG):
    layer = FastWeightLayer(config, MODEL, init_std=0.5, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    rng = np.random.default_rng(1)

    def draw(x):  # Rates differ, and no tensor is zero.
        return jnp.asarray(np.asarray(x, np.float64) + 0.3 * rng.normal(size=x.shape))

    return nnx.merge(graph, jax.tree.map(draw, params))


@pytest.fixture
def inputs(float64):
    rng = np.random.default_rng(0)
    x, head, bias = (rng.normal(size=s) for s in ((BATCH, LENGTH, MODEL), (MODEL, VOCAB), VOCAB))
    tokens = rng.integers(0, VOCAB, size=(BATCH, LENGTH))
    return jnp.asarray(x), jnp.asarray(tokens), (jnp.asarray(head), jnp.asarray(bias))


def whole(layer, x, tokens, readout):
    return jax.jit(layer.__call__)(x, tokens, readout)


def apply(tensors: HeadTensors, x):
    hidden = jax.nn.relu(x @ tensors.up + tensors.up_bias) ** 2
    y = hidden @ tensors.down + tensors.down_bias
    y = (y - y.mean()) / jnp.sqrt(y.var() + 1e-5)
    return y * tensors.scale + tensors.shift


def by_definition(layer, x, tokens, readout):
    """One sequence: every token through the tensors after steps on all tokens before it."""
    slow = HeadTensors(**{name: p[...] for name, p in layer.tensors.items()})
    rates = HeadTensors(*jnp.exp(layer.log_rates[...]))
    head, bias = readout

    def loss(tensors, t):
        logits = apply(tensors, x[t]) @ head + bias
        return -jax.nn.log_softmax(logits)[tokens[t + 1]]

    outputs, sums = [], jax.tree.map(jnp.zeros_like, slow)
    for t in range(len(x)):
        fast = jax.tree.map(lambda s, r, g: s - r * g, slow, rates, sums)
        outputs.append(apply(fast, x[t]))
        if t + 1 < len(x):
            sums = jax.tree.map(jnp.add, sums, jax.grad(loss)(slow, t))
    return jnp.stack(outputs)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-11), actual, expected
    )


def test_each_token_sees_the_steps_on_all_before_it_second_order_gradients_included(inputs):
    x, tokens, readout = inputs
    direction = np.random.default_rng(2).normal(size=(LENGTH, MODEL))
    graph, params = nnx.split(make())

    def of_layer(params, x, readout):
        return nnx.merge(graph, params)(x[None], tokens[:1], readout)[0]

    def defined(params, x, readout):
        return by_definition(nnx.merge(graph, params), x, tokens[0], readout)

    def gradients(function):
        def loss(*arguments):
            out = function(*arguments)
            return jnp.sum(direction * out), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(params, x[0], readout)

    assert_close(gradients(of_layer), gradients(defined))


def test_chunks_change_nothing(inputs):
    expected = whole(make(), *inputs)
    for size in (1, 10):
        assert_close(whole(make(replace(CONFIG, chunk_size=size)), *inputs), expected)


def test_without_steps_it_is_an_mlp(inputs):
    layer = make(replace(CONFIG, learn=False))
    slow = HeadTensors(**{name: p[...] for name, p in layer.tensors.items()})
    expected = jax.vmap(jax.vmap(lambda x: apply(slow, x)))(inputs[0])
    assert_close(whole(layer, *inputs), expected)
    learning = make()
    learning.log_rates.set_value(learning.log_rates[...] - 60.0)
    assert_close(whole(learning, *inputs), expected)


@pytest.mark.parametrize("cuts", [(1,) * LENGTH, (4, 5), (2, 6, 1)])
def test_a_stream_cut_anywhere_equals_the_whole(inputs, cuts):
    x, tokens, readout = inputs
    layer, start, outputs = make(), 0, []
    push = jax.jit(lambda x, tokens, stream: layer.stream(x, tokens, readout, stream))
    stream = layer.init_stream(BATCH, dtype=x.dtype)
    for length in cuts:
        part = slice(start, start + length)
        out, stream = push(x[:, part], tokens[:, part], stream)
        outputs.append(out)
        start += length
    assert_close(jnp.concatenate(outputs, axis=1), whole(layer, *inputs))


def test_padding_anywhere_is_as_if_it_were_not_there(inputs):
    x, tokens, readout = inputs
    layer, places = make(), jnp.asarray([0, 2, 6, 7])
    alone = whole(layer, x[:, places], tokens[:, places], readout)
    mask = jnp.zeros((BATCH, LENGTH)).at[:, places].set(1)
    padded = jax.jit(lambda x, mask: layer(x, tokens, readout, mask=mask))(x, mask)
    assert_close(padded[:, places], alone)
    stream, outputs = layer.init_stream(BATCH, dtype=x.dtype), []
    push = jax.jit(lambda x, t, stream, mask: layer.stream(x, t, readout, stream, mask=mask))
    for start in range(0, LENGTH, 3):  # The second piece is padding alone.
        part = slice(start, start + 3)
        out, stream = push(x[:, part], tokens[:, part], stream, mask[:, part])
        outputs.append(out)
    assert_close(jnp.concatenate(outputs, axis=1)[:, places], alone)


def test_reading_alone_keeps_the_stream(inputs):
    x, tokens, readout = inputs
    layer = make()

    @functools.partial(jax.jit, static_argnames="write")
    def push(x, tokens, stream, *, write=True):
        return layer.stream(x, tokens, readout, stream, write=write)

    _, stream = push(x[:, :4], tokens[:, :4], layer.init_stream(BATCH, dtype=x.dtype))
    out, same = push(x[:, 4:8], tokens[:, 4:8], stream, write=False)
    assert_close(same, stream)
    written, _ = push(x[:, 4:8], tokens[:, 4:8], stream)
    # The first read is the same but for the step on the token that waited for its label.
    assert np.max(np.abs(out - written)) > 1e-4


@pytest.mark.parametrize(("field", "value"), [("hidden_dim", 0), ("initial_rate", 0.0)])
def test_options_that_make_no_layer_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        replace(CONFIG, **{field: value})
