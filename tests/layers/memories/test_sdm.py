"""A memory layer with Sparse Delta Memory: streams of any cut, documents, refusals."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.rules import SDM
from fwpkm_jax.testing.rule_case import sample_signals

pytestmark = pytest.mark.usefixtures("float64")

MODEL, BATCH, LENGTH = 6, 2, 9
RULE = SDM.tiny()
CONFIG = FastWeightConfig(rule=RULE, chunk_size=4, documents="document")


@functools.cache
def layer_parts():
    return nnx.split(FastWeight(CONFIG, MODEL, init_std=0.5, rngs=nnx.Rngs(0)))


def layer(params=None):
    graphdef, ours = layer_parts()
    return nnx.merge(graphdef, ours if params is None else params)


def written_memory():
    """A memory for each sequence, after a text of its own."""
    signals = sample_signals(RULE, length=12, seed=7)
    query, value, gate, mask = map(jnp.asarray, signals)
    sequence = RULE.sequence(query, value, gate=gate, mask=mask, chunk_size=4)
    memory = jax.tree.map(lambda x: jnp.zeros((BATCH, *x.shape), jnp.float64), RULE.memory_shapes)
    one = jax.tree.map(lambda x: x[:, None], sequence._replace(cut=None))
    return RULE.run_groups(memory, one, chunk_size=4).memory


@functools.partial(jax.jit, static_argnames="write")
def jitted_pass(params, x, memory, mask, starts, *, write):
    return layer(params)(x, memory, mask=mask, starts=starts, write=write)[:2]


def whole(x, memory, mask=None, starts=None, *, write=True):
    return jitted_pass(layer_parts()[1], x, memory, mask, starts, write=write)


@jax.jit
def piece(params, x, memory, pending, mask, starts, initial):
    return layer(params).stream(x, memory, pending, mask=mask, starts=starts, initial=initial)[:3]


def in_pieces(lengths, x, memory, mask=None, starts=None):
    initial, outputs, first = memory, [], 0
    pending = layer().init_pending(BATCH, BATCH, max_chunk_size=4, dtype=jnp.float64)
    for length in lengths:
        part = slice(first, first + length)
        cut = [None if y is None else y[:, part] for y in (mask, starts)]
        given = None if starts is None else initial
        y, memory, pending = piece(layer_parts()[1], x[:, part], memory, pending, *cut, given)
        outputs.append(np.asarray(y))
        first += length
    return np.concatenate(outputs, axis=1), memory


def tokens(seed=0):
    return np.random.default_rng(seed).normal(size=(BATCH, LENGTH, MODEL))


def assert_close(actual, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), actual, expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[LENGTH], [1] * LENGTH, [4, 3, 2]], ids=str)
def test_a_stream_of_any_cut_equals_the_pass(lengths):
    x, memory = tokens(), written_memory()
    mask = np.ones((BATCH, LENGTH))
    mask[0, 2:4] = mask[1, 7:] = 0
    for real in (None, mask):
        expected, after = whole(x, memory, real)
        found, streamed = in_pieces(lengths, x, memory, real)
        assert_close(streamed, after)
        kept = np.ones((BATCH, LENGTH), bool) if real is None else real > 0
        assert_close(found[kept], np.asarray(expected)[kept])


@pytest.mark.slow
def test_documents_read_and_write_as_if_alone():
    x, memory = tokens(1), written_memory()
    starts = np.zeros((BATCH, LENGTH), bool)
    starts[0, [0, 1, 6]] = starts[1, [0, 4]] = True
    found, after = whole(x, memory, None, starts)
    for row in range(BATCH):
        edges = [*np.flatnonzero(starts[row]), LENGTH]
        for first, end in itertools.pairwise(edges):
            alone, left = whole(x[:, first:end], memory)
            assert_close(np.asarray(found)[row, first:end], np.asarray(alone)[row])
        assert_close(after.values[row], left.values[row])
    for lengths in ([1] * LENGTH, [5, 4]):
        streamed, end = in_pieces(lengths, x, memory, starts=starts)
        assert_close((streamed, end), (found, after))


def learned_layer():
    rule = dataclasses.replace(RULE, first_table="learned")
    config = dataclasses.replace(CONFIG, rule=rule)
    return FastWeight(config, MODEL, init_std=0.5, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_learned_table_is_where_memories_begin_and_go_back_to():
    learned, x = learned_layer(), jnp.asarray(tokens(3))
    starts = jnp.zeros((BATCH, LENGTH), bool).at[:, jnp.array([0, 5])].set(True)
    first = np.asarray(learned.first_values[...])
    begin = learned.init_memory(jax.random.key(0), groups=BATCH)
    np.testing.assert_array_equal(begin.values, np.broadcast_to(first, begin.values.shape))
    begin = jax.tree.map(lambda x: x.astype(jnp.float64), begin)

    def outputs(learned, memory, starts=None):
        return learned(x, memory, starts=starts)[:2]

    y, written = nnx.jit(outputs)(learned, begin)
    assert_close(learned.restart(written).values, begin.values)
    # The layer's other weights are those of one that begins with zeros.
    others = layer().init_memory(jax.random.key(0), groups=BATCH)._replace(values=begin.values)
    assert_close((y, written), nnx.jit(outputs)(layer(), others))
    # A document begins with it, too.
    packed, _ = nnx.jit(outputs)(learned, begin, starts)
    late, _ = nnx.jit(lambda learned, memory: learned(x[:, 5:], memory)[:2])(learned, begin)
    assert_close(np.asarray(packed)[:, 5:], late)


@pytest.mark.slow
def test_a_learned_table_has_the_gradient_that_its_differences_have():
    learned, x = learned_layer(), jnp.asarray(tokens(4))
    graphdef, params = nnx.split(learned)
    weights = np.random.default_rng(0).normal(size=x.shape)

    @jax.jit
    def loss(params):
        layer = nnx.merge(graphdef, params)
        memory = layer.init_memory(jax.random.key(0), groups=BATCH)
        memory = jax.tree.map(lambda x: x.astype(jnp.float64), memory)
        return jnp.sum(layer(x, layer.restart(memory))[0] * weights)

    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    gradient = jax.jit(jax.grad(loss))(params)["first_values"][...]
    assert np.sum(np.any(np.asarray(gradient) != 0, axis=1)) > 1
    way = np.random.default_rng(1).normal(size=gradient.shape)

    def moved(step):
        other = jax.tree.map(lambda x: x, params)
        other["first_values"] = params["first_values"].replace(params["first_values"][...] + step)
        return float(loss(other))

    along = (moved(1e-6 * way) - moved(-1e-6 * way)) / 2e-6
    np.testing.assert_allclose(np.sum(gradient * way), along, rtol=1e-6)


@pytest.mark.thorough
def test_a_frozen_memory_is_read_and_not_written():
    x, memory = tokens(2), written_memory()
    _, after = whole(x, memory, write=False)
    np.testing.assert_array_equal(after.values, memory.values)


@pytest.mark.thorough
def test_what_does_not_fit_is_refused_with_the_way_out():
    x, memory = jnp.zeros((2, 4, MODEL)), layer().init_memory(jax.random.key(0), groups=1)
    with pytest.raises(ValueError, match="SDM with 1 memories for 2 sequences"):
        layer()(x, memory)
    own = layer().init_memory(jax.random.key(0), groups=2)
    pending = layer().init_pending(2, 2, max_chunk_size=4, dtype=jnp.float32)
    with pytest.raises(ValueError, match="SDM writes each token at once"):
        layer().stream(x, own, pending, chunk_size="flush")
    sizes, names = (1, 1, 2), ("data", "fsdp", "model")
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with pytest.raises(ValueError, match=r"'slots' with SDM: .* of all its slots"):
        Partition(mesh, "slots").memory_specs(RULE, own)
