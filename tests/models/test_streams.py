"""Streams of the whole decoder, cut, masked and flushed at random places."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.models.language_model import LanguageModel
from tests.models.test_language_model import CONFIG

# All mixers around one memory; that several keep apart is said elsewhere.
MODEL = dataclasses.replace(
    CONFIG,
    memory_layers=(1,),
    memory_mixer=dataclasses.replace(CONFIG.attention, window=3),
    fast_weight_layer=FastWeightLayerConfig(hidden_dim=6, chunk_size=4),
)
BATCH, MAX_LENGTH = 2, 12
# Few lengths, so that each compiles once for all examples; 12 is longer than two windows.
LENGTHS = (1, 3, 12)
# Rounding then cannot change which slots are read.
pytestmark = pytest.mark.usefixtures("float64")


@functools.cache
def build():
    graphdef, weights = nnx.split(LanguageModel(MODEL, rngs=nnx.Rngs(0), dtype=None))
    return graphdef, as_doubles(weights)


def as_doubles(tree):
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if floating(x) else x, tree)


@functools.partial(jax.jit, static_argnames="chunk_size")
def piece(params, tokens, stream, mask, *, chunk_size=None):
    decoder = nnx.merge(build()[0], params)
    return decoder.stream(tokens, stream, mask=mask, chunk_size=chunk_size)


@jax.jit
def flush(params, stream):
    return nnx.merge(build()[0], params).flush(stream)


@functools.partial(jax.jit, static_argnames="groups")
def start(params, *, groups):
    model = nnx.merge(build()[0], params)
    memory = model.init_memory(jax.random.key(1), groups=groups)
    memory = jax.tree.map(lambda x: x.astype(jnp.float64), memory)
    return model.init_stream(memory, batch=BATCH, max_length=MAX_LENGTH)


def in_pieces(lengths, tokens, mask, groups):
    params = build()[1]
    stream, logits, first = start(params, groups=groups), [], 0
    for length in lengths:
        part = slice(first, first + length)
        out = piece(params, tokens[:, part], stream, mask[:, part])
        logits.append(out.logits)
        stream = out.stream
        first += length
    return np.concatenate(logits, axis=1), stream.memory, flush(params, stream).memory


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, pytest.param(BATCH, marks=pytest.mark.slow)])
@settings(max_examples=5)
@given(
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    share=st.sampled_from([0.0, 0.3]),
)
def test_a_stream_cut_anywhere_is_the_stream_token_by_token(groups, lengths, seed, share):
    rng = np.random.default_rng(seed)
    shape = (BATCH, sum(lengths))
    tokens = rng.integers(0, CONFIG.vocab_size, shape, dtype=np.int32)
    mask = (rng.uniform(size=shape) >= share).astype(np.float64)
    # What is computed at padding, where nothing is read, depends on the cut.
    real = mask == 1
    logits, *memories = in_pieces(lengths, tokens, mask, groups)
    one_by_one, *expected = in_pieces([1] * shape[1], tokens, mask, groups)
    chex.assert_trees_all_close(logits[real], one_by_one[real], rtol=1e-8, atol=1e-9)
    chex.assert_trees_all_close(memories, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.slow_cases("2", "1")
@pytest.mark.thorough
@pytest.mark.parametrize("groups", [1, BATCH])
def test_what_stands_at_padding_changes_no_token_and_no_memory(groups):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (BATCH, 15), dtype=np.int32)
    mask = (rng.uniform(size=tokens.shape) < 0.7).astype(np.float64)
    other = np.where(mask == 1, tokens, (tokens + 5) % CONFIG.vocab_size)
    (logits, *memories), (same, *others) = (
        in_pieces([12, 3], ids, mask, groups) for ids in (tokens, other)
    )
    real = mask == 1
    np.testing.assert_array_equal(logits[real], same[real])
    chex.assert_trees_all_equal(memories, others)


@pytest.mark.slow
def test_jit_equals_eager():
    config = dataclasses.replace(CONFIG, mixers=("swa",), memory_layers=(0,), pkm_layers=())
    decoder = LanguageModel(config, rngs=nnx.Rngs(0), dtype=None)
    graphdef, weights = nnx.split(decoder)
    weights, memory = as_doubles((weights, decoder.init_memory(jax.random.key(1))))
    weights, memory = jax.tree.map(jnp.asarray, (weights, memory))
    tokens = jnp.asarray([[3, 1, 4, 1]], jnp.int32)  # One chunk: eager code compiles op by op.
    eager = nnx.merge(graphdef, weights)(tokens, memory)
    jitted = jax.jit(lambda weights: nnx.merge(graphdef, weights)(tokens, memory))(weights)
    for name, rtol in (("logits", 1e-9), ("memory", 1e-9), ("info", 1e-6)):  # Shares are float32.
        results = (getattr(out, name) for out in (jitted, eager))
        chex.assert_trees_all_close(*results, rtol=rtol, atol=1e-10)
