"""Rows of several documents: each document gives the same results as in a separate row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.core.targets import WriteWeights
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import StreamDocument
from tests.models.test_language_model import CONFIG
from tests.models.test_streams import as_doubles

MODEL = dataclasses.replace(
    CONFIG,
    mixers=("gdn", "swa", "mlstm", "attention"),
    memory_layers=(1,),
    fast_weight_layer=FastWeightLayerConfig(hidden_dim=6, chunk_size=4, segment_length=3),
)
LENGTH = 12
# One token alone, boundaries at ends of chunks of 4, and padding between and behind documents.
IDS = np.array([[1, 2, 2, 2, 3, 3, 3, 0, 0, 4, 4, 4], [7, 7, 7, 7, 7, 8, 0, 9, 9, 9, 0, 0]])
pytestmark = pytest.mark.usefixtures("float64")


@functools.cache
def build():
    graphdef, weights = nnx.split(LanguageModel(MODEL, rngs=nnx.Rngs(0), dtype=None))
    model = nnx.merge(graphdef, weights)
    memory = as_doubles(model.init_memory(jax.random.key(1)))
    return graphdef, as_doubles(weights), memory


@functools.partial(jax.jit, static_argnames="remat")
def gradients(params, tokens, weight, remat=None, **documents):
    """Logits, and gradients of a weighted sum of them, with the memory as it is."""

    def loss(params):
        model = nnx.merge(build()[0], params)
        memory = jax.tree.map(jnp.asarray, build()[2])
        hidden = model.hidden(tokens, memory, write=False, remat=remat, **documents)
        logits = model.logits(hidden.x, hidden.token_bias)
        return jnp.sum(jnp.sin(logits) * weight[..., None]), logits

    return jax.value_and_grad(loss, has_aux=True)(params)


def drawn():
    rng = np.random.default_rng(0)
    return rng.integers(0, MODEL.vocab_size, size=IDS.shape), rng.normal(size=IDS.shape)


@pytest.mark.slow
def test_documents_read_as_in_rows_of_their_own():
    """Through every kind of layer; with resets off the same comparison finds the leak."""
    tokens, weight = drawn()
    weight = weight * (IDS != 0)
    runs = [(row, number) for row in range(2) for number in np.unique(IDS[row]) if number]
    places = [np.flatnonzero(IDS[row] == number) for row, number in runs]
    apart = np.zeros((3, len(runs), LENGTH))
    for own, ((row, _), at) in enumerate(zip(runs, places, strict=True)):
        parts = tokens[row, at], weight[row, at], np.ones(len(at))
        apart[:, own, : len(at)] = np.stack(parts)
    params = build()[1]
    (_, expected), d_expected = gradients(params, apart[0].astype(int), apart[1], mask=apart[2])
    segment_ids = jnp.asarray(IDS)
    (_, logits), d_params = gradients(params, tokens, weight, segment_ids=segment_ids)
    (_, leaky), _ = gradients(params, tokens, weight, segment_ids=jnp.ones_like(segment_ids))
    leaks = []
    for own, ((row, _), at) in enumerate(zip(runs, places, strict=True)):
        np.testing.assert_allclose(
            logits[row, at], expected[own, : len(at)], rtol=1e-12, atol=1e-12
        )
        leaks.append(np.max(np.abs(leaky[row, at] - expected[own, : len(at)])))
    assert np.sort(leaks)[2] > 1e-3  # All but the two first documents.
    for (path, ours), other in zip(
        jax.tree_util.tree_leaves_with_path(d_params), jax.tree.leaves(d_expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(ours, other, rtol=1e-10, atol=1e-12, err_msg=name)
    again = gradients(params, tokens, weight, remat="block", segment_ids=segment_ids)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), again, d_params)


@pytest.mark.slow
def test_no_token_is_paired_with_a_value_of_another_document():
    """The memory continues across documents; pairs across documents and padding do not write."""

    def of_tokens(gate, mask, *, chunk_size, lookahead):
        del mask
        write, paired = np.zeros(IDS.shape), np.zeros(IDS.shape)
        for row, token in np.ndindex(IDS.shape):
            later = token + lookahead
            if later < LENGTH and later // chunk_size == token // chunk_size:
                paired[row, token] = IDS[row, later] == IDS[row, token]
                write[row, token] = paired[row, token] and IDS[row, token] != 0
        return WriteWeights(gate * write, jnp.asarray(paired), jnp.asarray(1.0 * (IDS != 0)))

    @jax.jit
    def layer(params):
        memory_layer = nnx.merge(build()[0], params).blocks[1].memory
        x = jnp.asarray(np.random.default_rng(1).normal(size=(*IDS.shape, MODEL.model_dim)))
        starts = jnp.asarray(np.diff(IDS, axis=1, prepend=-1) != 0)
        memory = jax.tree.map(jnp.asarray, build()[2]["layer_1"])
        mask = jnp.asarray(1.0 * (IDS != 0))
        ours = memory_layer(x, memory, mask=mask, starts=starts)
        return ours[:2], memory_layer(x, memory, mask=mask, pairing=of_tokens)[:2], memory

    ours, expected, before = layer(build()[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-13), ours, expected)
    assert np.any(np.asarray(ours[1].values) != np.asarray(before.values))


@jax.jit
def piece(params, tokens, stream, segment_ids):
    model = nnx.merge(build()[0], params)
    return model.stream(tokens, stream, segment_ids=segment_ids, write=False)


@pytest.mark.slow
def test_a_stream_of_documents_reads_as_the_row():
    """In pieces within which documents start and go on, with padding between them."""
    tokens, weight = drawn()
    params = build()[1]
    (_, expected), _ = gradients(params, tokens, weight, segment_ids=jnp.asarray(IDS))
    memory = jax.tree.map(jnp.asarray, build()[2])
    model = nnx.merge(build()[0], params)
    stream, parts = model.init_stream(memory, batch=2, max_length=LENGTH), []
    ids = jnp.asarray(IDS, jnp.int32)
    # So that all pieces have one structure.
    stream = stream._replace(document=StreamDocument(jnp.zeros_like(ids[:, 0]), ids[:, 0] * 0))
    for first in range(0, LENGTH, 4):
        at = slice(first, first + 4)
        out = piece(params, tokens[:, at], stream, ids[:, at])
        stream = out.stream
        parts.append(out.logits)
    logits = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(logits[IDS != 0], expected[IDS != 0], rtol=1e-11, atol=1e-12)
    assert stream.document.number.tolist() == [5, 5]


@pytest.mark.slow
def test_documents_of_a_stream_start_from_the_initial_memory():
    """With `documents="document"` nothing that was read before the row matters."""
    config = dataclasses.replace(
        MODEL,
        mixers=("swa", "swa"),
        fast_weight=dataclasses.replace(MODEL.fast_weight, documents="document"),
        fast_weight_layer=None,
    )
    graphdef, weights = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0), dtype=None))
    model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, as_doubles(weights)))
    tokens = jnp.asarray(drawn()[0])
    initial = jax.tree.map(jnp.asarray, as_doubles(model.init_memory(jax.random.key(1), groups=2)))

    @jax.jit
    def stream(memory):
        first = model.init_stream(memory, batch=2, max_length=LENGTH)
        ids = jnp.asarray(IDS, jnp.int32)
        out = model.stream(tokens, first, segment_ids=ids, initial=initial, chunk_size=2)
        return out.logits, out.stream.memory

    (logits, memory), (same, _) = stream(initial), stream(jax.tree.map(lambda x: x + 1, initial))
    np.testing.assert_array_equal(logits, same)
    written = memory["layer_1"].values != initial["layer_1"].values
    assert np.all(np.any(np.asarray(written), axis=(1, 2)))


@pytest.mark.slow
def test_tokens_that_wait_are_paired_within_their_document():
    params, memory = build()[1], jax.tree.map(jnp.asarray, build()[2]["layer_1"])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(*IDS.shape, MODEL.model_dim)))
    starts = np.diff(IDS, axis=1, prepend=-1) != 0
    numbers, mask = jnp.asarray(np.cumsum(starts, axis=1)), jnp.asarray(1.0 * (IDS != 0))

    @jax.jit
    def written(params, memory, moved):
        layer = nnx.merge(build()[0], params).blocks[1].memory
        options = {"max_chunk_size": LENGTH, "dtype": jnp.float64}
        pending = layer.init_pending(2, 1, **options)
        options = {"mask": mask, "numbers": numbers, "chunk_size": "flush"}
        _, memory, pending, _ = layer.stream(x, memory, pending, **options)
        tokens = pending.tokens
        value = tokens.value + jnp.pad(moved, ((0, 0), (0, 1)))[None, :, :, None]
        pending = pending._replace(tokens=tokens._replace(value=value))
        return layer.flush(memory, pending)[0]

    # A position where both rows have padding takes no place in the queue: here there is none.
    before = written(params, memory, jnp.zeros(IDS.shape))
    # The first token of a document is the target of none; any other one is.
    same = written(params, memory, jnp.asarray(1.0 * starts))
    jax.tree.map(np.testing.assert_array_equal, same, before)
    other = written(params, memory, jnp.asarray(1.0 * (~starts & (IDS != 0))))
    assert np.any(np.asarray(other.values) != np.asarray(before.values))
