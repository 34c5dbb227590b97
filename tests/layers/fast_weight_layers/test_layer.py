"""Fast Weight Layers: the gradient steps they are defined by, and their streams."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayer, FastWeightLayerConfig
from fwpkm_jax.layers.fast_weight_layers.steps import HeadTensors

pytestmark = pytest.mark.usefixtures("float64")
MODEL, VOCAB, BATCH, LENGTH = 4, 7, 2, 8
CONFIG = FastWeightLayerConfig(hidden_dim=6, chunk_size=4, initial_rate=0.3)
SEGMENTS = replace(CONFIG, segment_length=3, chunk_size=5)  # Chunks hold ends of segments.
OUTPUT_BIAS = replace(SEGMENTS, steps="output_bias")
several = pytest.mark.parametrize(
    "config",
    [pytest.param(CONFIG, marks=pytest.mark.slow), SEGMENTS, OUTPUT_BIAS],
    ids=["layer", "segments", "output_bias"],
)


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
    config = layer.config
    slow = HeadTensors(**{name: p[...] for name, p in layer.tensors.items()})
    moving = readout[1] if config.steps == "output_bias" else slow
    rates = jnp.exp(layer.log_rates[...])
    decays = jnp.ones_like(rates)
    if config.segment_length:
        decays = jax.nn.sigmoid(layer.decay_logits[...])

    def of_each(numbers):  # One for each tensor.
        return HeadTensors(*numbers) if isinstance(moving, HeadTensors) else numbers[0]

    def forward(moved, t):
        tensors, bias = (slow, moved) if config.steps == "output_bias" else (moved, readout[1])
        y = apply(tensors, x[t])
        return y, y @ readout[0] + bias

    def loss(moved, t):
        return -jax.nn.log_softmax(forward(moved, t)[1])[tokens[t + 1]]

    outputs, earlier, current = [], *[jax.tree.map(jnp.zeros_like, moving)] * 2
    for t in range(len(x)):
        if config.segment_length and t and t % config.segment_length == 0:
            earlier = jax.tree.map(lambda e, d, c: d * e + c, earlier, of_each(decays), current)
            current = jax.tree.map(jnp.zeros_like, moving)
        fast = jax.tree.map(
            lambda m, r, e, c: m - r * (e + c), moving, of_each(rates), earlier, current
        )
        outputs.append(forward(fast, t)[config.steps == "output_bias"])
        if t + 1 < len(x):
            current = jax.tree.map(jnp.add, current, jax.grad(loss)(moving, t))
    return jnp.stack(outputs)


def read(layer, out, readout):
    """What a definition gives: the layer's outputs, or the logits where their bias moves."""
    return out.x if out.bias is None else out.x @ readout[0] + readout[1][None, None] + out.bias


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-11), actual, expected
    )


@pytest.mark.slow
@several
def test_each_token_sees_the_steps_on_all_before_it_second_order_gradients_included(config, inputs):
    x, tokens, readout = inputs
    width = VOCAB if config.steps == "output_bias" else MODEL
    direction = np.random.default_rng(2).normal(size=(LENGTH, width))
    graph, params = nnx.split(make(config))

    def of_layer(params, x, readout):
        layer = nnx.merge(graph, params)
        return read(layer, layer(x[None], tokens[:1], readout), readout)[0]

    def defined(params, x, readout):
        return by_definition(nnx.merge(graph, params), x, tokens[0], readout)

    def gradients(function):
        def loss(*arguments):
            out = function(*arguments)
            return jnp.sum(direction * out), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(params, x[0], readout)

    assert_close(gradients(of_layer), gradients(defined))


@pytest.mark.slow
def test_chunks_change_nothing(inputs):
    expected = whole(make(SEGMENTS), *inputs)
    for size in (1, 10):
        assert_close(whole(make(replace(SEGMENTS, chunk_size=size)), *inputs), expected)


@pytest.mark.slow
def test_without_steps_it_is_an_mlp(inputs):
    layer = make(replace(CONFIG, steps="none"))
    slow = HeadTensors(**{name: p[...] for name, p in layer.tensors.items()})
    expected = jax.vmap(jax.vmap(lambda x: apply(slow, x)))(inputs[0])
    assert_close(whole(layer, *inputs).x, expected)
    learning = make()
    learning.log_rates.set_value(learning.log_rates[...] - 60.0)
    assert_close(whole(learning, *inputs).x, expected)


@pytest.mark.thorough("output_bias")
@pytest.mark.parametrize(
    ("config", "cuts"),
    [(CONFIG, (4, 4)), (SEGMENTS, (1,) * LENGTH), (SEGMENTS, (2, 5, 1)), (OUTPUT_BIAS, (5, 3))],
    ids=["layer", "segments_by_token", "segments", "output_bias"],
)
def test_a_stream_cut_anywhere_equals_the_whole(config, inputs, cuts):
    x, tokens, readout = inputs
    layer, start, outputs = make(config), 0, []
    push = jax.jit(lambda x, tokens, stream: layer.stream(x, tokens, readout, stream))
    stream = layer.init_stream(BATCH, vocab=VOCAB, dtype=x.dtype)
    for length in cuts:
        part = slice(start, start + length)
        out, stream = push(x[:, part], tokens[:, part], stream)
        outputs.append(out)
        start += length
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outputs)
    assert_close(joined, whole(layer, *inputs))


@pytest.mark.slow
@pytest.mark.parametrize("config", [SEGMENTS, OUTPUT_BIAS], ids=["segments", "output_bias"])
def test_padding_anywhere_is_as_if_it_were_not_there(config, inputs):
    x, tokens, readout = inputs
    layer, places = make(config), jnp.asarray([0, 2, 6, 7])
    alone = whole(layer, x[:, places], tokens[:, places], readout)
    mask = jnp.zeros((BATCH, LENGTH)).at[:, places].set(1)
    padded = jax.jit(lambda x, mask: layer(x, tokens, readout, mask=mask))(x, mask)
    chosen = lambda out: jax.tree.map(lambda x: x[:, places], out)  # noqa: E731
    assert_close(chosen(padded), alone)
    stream, outputs = layer.init_stream(BATCH, vocab=VOCAB, dtype=x.dtype), []
    push = jax.jit(lambda x, t, stream, mask: layer.stream(x, t, readout, stream, mask=mask))
    for start in range(0, LENGTH, 2):  # The second piece and the third hold padding alone.
        part = slice(start, start + 2)
        out, stream = push(x[:, part], tokens[:, part], stream, mask[:, part])
        outputs.append(out)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outputs)
    assert_close(chosen(joined), alone)


@pytest.mark.thorough
def test_reading_alone_keeps_the_stream(inputs):
    x, tokens, readout = inputs
    layer = make()

    @functools.partial(jax.jit, static_argnames="write")
    def push(x, tokens, stream, *, write=True):
        return layer.stream(x, tokens, readout, stream, write=write)

    _, stream = push(x[:, :4], tokens[:, :4], layer.init_stream(BATCH, vocab=VOCAB, dtype=x.dtype))
    out, same = push(x[:, 4:8], tokens[:, 4:8], stream, write=False)
    assert_close(same, stream)
    written, _ = push(x[:, 4:8], tokens[:, 4:8], stream)
    # The first read is the same but for the step on the token that waited for its label.
    assert np.max(np.abs(out.x - written.x)) > 1e-4


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_dim", 0), ("segment_length", 0), ("initial_rate", 0.0), ("initial_decay", 1.0)],
)
def test_options_that_make_no_layer_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        replace(CONFIG, **{field: value})


@pytest.mark.slow
@several
def test_documents_take_their_own_steps(config, inputs):
    """Each as alone in a row, its segments counted from its first token."""
    x, tokens, readout = inputs
    layer, ends = make(config), [[1, 5, 8], [3, 4, 8]]
    starts, rows = np.zeros((BATCH, LENGTH), bool), np.zeros((2 * 3, LENGTH), int)
    mask = np.zeros(rows.shape)
    for row in range(BATCH):
        for number, (first, end) in enumerate(zip([0, *ends[row][:-1]], ends[row], strict=True)):
            starts[row, first] = True
            rows[3 * row + number, : end - first] = row * LENGTH + np.arange(first, end)
            mask[3 * row + number, : end - first] = 1
    ours = jax.jit(layer.__call__)(x, tokens, readout, starts=jnp.asarray(starts))
    apart = x.reshape(-1, MODEL)[rows], tokens.reshape(-1)[rows]
    expected = jax.jit(layer.__call__)(*apart, readout, mask=jnp.asarray(mask))
    for found, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        found = np.asarray(found).reshape(BATCH * LENGTH, -1)
        for row in range(len(rows)):
            at = mask[row] != 0
            np.testing.assert_allclose(found[rows[row, at]], other[row, at], atol=1e-12)

    # The same in pieces of a stream.
    stream = layer.init_stream(BATCH, vocab=VOCAB, dtype=x.dtype)
    run, parts = jax.jit(layer.stream), []
    for first in range(0, LENGTH, 2):
        at = slice(first, first + 2)
        part, stream = run(
            x[:, at], tokens[:, at], readout, stream, starts=jnp.asarray(starts[:, at])
        )
        parts.append(part)
    joined = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), joined, ours)
