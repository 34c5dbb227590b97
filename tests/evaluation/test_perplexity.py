from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fwpkm_jax.data import Document
from fwpkm_jax.evaluation import perplexity_views
from fwpkm_jax.evaluation.perplexity import PERPLEXITY, PerplexityConfig
from fwpkm_jax.evaluation.readers.document_reader import read_document
from fwpkm_jax.evaluation.readers.segments import split_into_segments
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader, flush, reset_caches
from fwpkm_jax.evaluation.sources import Source
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import FwMLP
from tests.evaluation.conftest import tiny_model_config

SEGMENT = 16


def random_document(length: int, seed: int = 0) -> np.ndarray:
    # Few different tokens, so that the memory has something to repeat.
    return np.random.default_rng(seed).integers(8, size=length).astype(np.int32)


def source(*documents: np.ndarray, name: str = "text") -> Source:
    def cut(most_tokens=None):
        return [Document(str(i), d[:most_tokens]) for i, d in enumerate(documents)]

    return Source(name, cut, {})


def evaluate(model, memory, *sources: Source, **options):
    config = PerplexityConfig(segment_length=SEGMENT, **options)
    return PERPLEXITY.of_model(model, memory, config=config, sources=sources)


def losses_of(reader: StreamReader, document: np.ndarray, length=SEGMENT, **options) -> np.ndarray:
    readings = read_document(reader, document, segment_length=length, **options)
    return np.concatenate([reading.losses() for reading in readings])


def plain_losses(logits: jax.Array, labels: np.ndarray) -> np.ndarray:
    return np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits[0], labels))


@partial(jax.jit, static_argnames="graphdef")
def read_whole(graphdef, params, stream, tokens):
    out = nnx.merge(graphdef, params).stream(tokens, stream)
    return out.logits, out.stream


@partial(jax.jit, static_argnames="graphdef")
def read_frozen(graphdef, params, memory, tokens):
    return nnx.merge(graphdef, params)(tokens, memory, write=False).logits


def stream_losses(model, memory, document):
    """The same protocol written out: whole segments of any length, no piece, no padding."""
    graphdef, params = nnx.split(model)
    copy = jax.tree.map(jnp.copy, memory)  # The stream's buffers are reused.
    stream = model.init_stream(copy, batch=1, max_length=SEGMENT)
    losses = []
    for start, length in split_into_segments(len(document), segment_length=SEGMENT):
        stream = reset_caches(graphdef, params, stream, pending=False)
        tokens, labels = document[start : start + length], document[start + 1 : start + length + 1]
        logits, stream = read_whole(graphdef, params, stream, tokens[None])
        losses.append(plain_losses(logits, labels))
    return np.concatenate(losses), flush(graphdef, params, stream).memory


@pytest.mark.slow
def test_frozen_streaming_equals_plain_segments(model, memory):
    document = random_document(2 * SEGMENT + 8)
    result = evaluate(model, memory, source(document), write="off")
    for start, length in split_into_segments(len(document), segment_length=SEGMENT):
        logits = read_frozen(*nnx.split(model), memory, document[None, start : start + length])
        expected = plain_losses(logits, document[start + 1 : start + length + 1])
        actual = result.arrays["loss_frozen"][start : start + length]
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.thorough("33")
@pytest.mark.slow_cases("44")
@pytest.mark.parametrize("length", [2 * SEGMENT + 1, 2 * SEGMENT + 12, 12])
def test_a_document_in_pieces_equals_whole_segments(model, memory, length):
    document = random_document(length)
    reader = StreamReader(model, memory, write=True, piece_length=SEGMENT)
    losses, after = stream_losses(model, memory, document)
    np.testing.assert_allclose(losses_of(reader, document), losses, rtol=2e-5, atol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), reader.stream.memory, after
    )


@pytest.mark.slow
def test_writing_and_frozen_differ_and_their_difference_is_reported(model, memory):
    result = evaluate(model, memory, source(random_document(50)))
    on, off = (result.arrays[f"loss_{name}"] for name in ("writing", "frozen"))
    assert np.max(np.abs(on - off)) > 1e-3
    # Nothing is written before the first chunk and its lookahead are there.
    np.testing.assert_allclose(on[:9], off[:9], atol=1e-5)
    difference = result.record["results"]["difference"]["all"]
    assert difference["loss"] == pytest.approx(np.mean(on - off), abs=1e-6)
    assert difference["segments"] == 4
    low, high = difference["interval"]
    assert low < difference["loss"] < high


@pytest.mark.slow
def test_fast_weights_may_be_rounded_after_every_segment(model, memory):
    document = source(random_document(3 * SEGMENT + 1))
    exact, rounded = (
        PERPLEXITY.of_model(
            *(model, memory),
            config=PerplexityConfig(write="on", segment_length=SEGMENT),
            sources=[document],
            fast_weight_dtype=dtype,
        )
        for dtype in ("float32", "bfloat16")
    )
    assert rounded.record["provenance"]["fast_weight_dtype"] == "bfloat16"
    assert 1e-6 < np.max(np.abs(exact.arrays["loss_writing"] - rounded.arrays["loss_writing"])) < 1
    options = {"write": True, "piece_length": SEGMENT, "fast_weight_dtype": "bfloat16"}
    reader = StreamReader(model, memory, **options)
    losses_of(reader, random_document(2 * SEGMENT + 1))
    for leaf in jax.tree.leaves(reader.stream.memory):
        np.testing.assert_array_equal(leaf, leaf.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.slow
def test_perplexity_weighs_tokens_and_not_documents(model, memory):
    result = evaluate(model, memory, source(random_document(40), random_document(5)))
    losses = result.arrays["loss_writing"]
    assert len(losses) == 39 + 4 == result.record["provenance"]["scored_tokens"]
    score = result.record["results"]["writing"]["all"]
    assert score["perplexity"] == pytest.approx(np.exp(losses.astype(np.float64).mean()))
    assert score["documents"] == 2
    np.testing.assert_array_equal(result.arrays["document"], [0] * 39 + [1] * 4)
    np.testing.assert_array_equal(result.arrays["segment"][:39], [0] * 16 + [1] * 16 + [2] * 7)
    np.testing.assert_array_equal(result.arrays["position"][-6:], [5, 6, 0, 1, 2, 3])


@pytest.mark.slow
def test_memory_is_carried_over_documents_or_reset_in_each(model, memory):
    document = random_document(30)
    twice = source(document, document)
    reset = evaluate(model, memory, twice, write="on", memory_reset="document")
    first, second = np.split(reset.arrays["loss_writing"], 2)
    np.testing.assert_array_equal(first, second)
    carried = evaluate(model, memory, twice, write="on").arrays["loss_writing"]
    np.testing.assert_array_equal(carried[:29], first)
    assert np.max(np.abs(carried[29:] - second)) > 1e-3


@pytest.mark.slow
def test_memory_is_carried_over_data_sets_which_are_scored_apart(model, memory):
    one, two = random_document(30), random_document(20, seed=1)
    apart = evaluate(model, memory, source(one, name="a"), source(two, name="b"))
    joined = evaluate(model, memory, source(one, two))
    np.testing.assert_array_equal(apart.arrays["loss_writing"], joined.arrays["loss_writing"])
    by_source = apart.record["results"]["writing"]["by_source"]
    assert [by_source[name]["tokens"] for name in "ab"] == [29, 19]


@pytest.mark.thorough("17-2")
@pytest.mark.parametrize(("length", "writes"), [(17, 2), (16, 1), (18, 2)])
def test_the_reference_queue_writes_what_the_release_writes(model, memory, length, writes):
    # Chunks of 8: a segment of 16 inputs is written twice (the second time 7 pairs, at its end),
    # one of 15 inputs once; what waits then is lost.
    reader = StreamReader(model, memory, write=True, piece_length=SEGMENT)
    document = random_document(length)
    losses_of(reader, document, protocol="release")
    stream = model.init_stream(jax.tree.map(jnp.copy, memory), batch=1, max_length=SEGMENT)
    inputs = document[None, : min(length - 1, SEGMENT)]
    graphdef, params = nnx.split(model)
    _, stream = read_whole(graphdef, params, stream, inputs)
    if writes == 2:
        stream = flush(graphdef, params, stream)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        reader.stream.memory,
        stream.memory,
    )


@pytest.mark.thorough
def test_the_limits_cut_documents_and_tokens_exactly(model, memory):
    documents = [random_document(20, seed=s) for s in range(4)]
    limited = evaluate(model, memory, source(*documents), write="off", max_tokens=30)
    assert np.bincount(limited.arrays["document"]).tolist() == [19, 11]
    limited = evaluate(model, memory, source(*documents), write="off", max_documents=3)
    assert np.bincount(limited.arrays["document"]).tolist() == [19, 19, 19]


@pytest.mark.slow
def test_every_tail_length_shares_few_compiled_functions(model, memory, monkeypatch):
    traced, segment_length = [], 15
    whole = LanguageModel.stream
    monkeypatch.setattr(
        LanguageModel,
        "stream",
        lambda self, tokens, *rest, **options: (
            traced.append(tokens.shape[1]) or whole(self, tokens, *rest, **options)
        ),
    )
    for write in (True, False):
        traced.clear()
        # With a chunk size that no other test has compiled.
        reader = StreamReader(model, memory, write=write, piece_length=segment_length, chunk_size=7)
        for length in range(2, 2 * segment_length, 3):
            losses_of(reader, random_document(length), segment_length)
        # Frozen, a rest is padded: a full piece and a padded one are compiled apart.
        assert sorted(traced) == ([1, 4, 15] if write else [1, 4, 15, 15])


@pytest.mark.slow
def test_the_first_of_several_memories_is_read_and_said(model, memory):
    several = jax.tree.map(lambda x: jnp.concatenate([x, x + 1, x - 1]), memory)
    document = source(random_document(30))
    one, many = evaluate(model, memory, document), evaluate(model, several, document)
    np.testing.assert_array_equal(one.arrays["loss_writing"], many.arrays["loss_writing"])
    assert many.record["provenance"]["memory_groups_in_checkpoint"] == 3
    assert many.record["provenance"]["resets"]["memory_group_used"] == 0


@pytest.mark.slow
def test_without_a_memory_writing_changes_nothing():
    model = LanguageModel(tiny_model_config(memory_layers=(), mixers=("swa",)), rngs=nnx.Rngs(0))
    result = evaluate(model, {}, source(random_document(30)))
    assert result.record["results"]["difference"]["all"]["loss"] == pytest.approx(0, abs=1e-5)
    assert result.record["results"]["writing"]["gate_mean"] == {}


@pytest.mark.thorough
def test_curves_average_runs_of_tokens_and_gates_lie_between_0_and_1(model, memory):
    result = evaluate(model, memory, source(random_document(300)))
    (curve,) = result.record["results"]["curves"]
    losses = result.arrays["loss_frozen"]
    expected = [losses[:128].mean(), losses[128:256].mean(), losses[256:].mean()]
    np.testing.assert_allclose(curve["frozen"], expected, rtol=1e-6)
    assert 0 < result.record["results"]["writing"]["gate_mean"]["layer_1"] < 1


@pytest.mark.slow
def test_addressing_is_measured_in_windows_of_segments(model, memory):
    result = evaluate(model, memory, source(random_document(8 * 2 * SEGMENT + 20)))
    measured = result.record["results"]["writing"]["addressing"]
    assert measured["layer_1"]["windows"] == 2
    assert 0 < measured["layer_1"]["coverage"] <= 1
    assert measured["mean"]["kld"] == measured["layer_1"]["kld"] <= np.log(16)


@pytest.mark.slow
def test_a_memory_without_slots_has_no_addressing():
    rule = FwMLP(key_dim=8, value_dim=8, hidden_dim=8, learning_rate=1.0)
    config = tiny_model_config(fast_weight=FastWeightConfig(rule=rule, chunk_size=8))
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    result = evaluate(
        model, model.init_memory(jax.random.key(1)), source(random_document(40)), write="both"
    )
    results = result.record["results"]
    assert results["writing"]["addressing"] == {}
    assert results["difference"]["all"]["loss"] != 0
    assert "layer_1" in perplexity_views.table(result.record)


@pytest.mark.slow
def test_texts_without_a_prediction_are_refused(model, memory):
    with pytest.raises(ValueError, match="text: no document"):
        evaluate(model, memory, source(random_document(1)))


@pytest.mark.parametrize("field", ["segment_length", "max_tokens", "chunk_size"])
def test_options_below_their_least_value_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        PerplexityConfig(**{field: 0})
