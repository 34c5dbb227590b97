"""Texts side by side: the numbers are those of each text read alone."""

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.evaluation.readers.batch_reader import (
    BatchReader,
    Part,
    Prompt,
    ReadingOptions,
    Text,
)
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader, decode
from fwpkm_jax.models.language_model import LanguageModel
from tests.evaluation.conftest import tiny_model_config

rng = np.random.default_rng(0)


def tokens(length: int) -> np.ndarray:
    return rng.integers(0, 256, length).astype(np.int32)


TEXTS = [
    Text([Part(tokens(21), tokens(3))]),
    Text([Part(tokens(5), tokens(9)), Part(tokens(12), tokens(2))]),
    Text([Part(tokens(1), tokens(23))]),
]
PROMPTS = [
    Prompt(document=tokens(19), question=tokens(4)),
    Prompt(document=tokens(6), question=tokens(2)),
    Prompt(question=tokens(9)),
]


@pytest.fixture(scope="module")
def model():
    return LanguageModel(tiny_model_config(mixers=("swa",), memory_layers=(0,)), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def memory(model):
    return model.init_memory(jax.random.key(1), groups=1)


def reader_of(model, memory, *, write=True, **options) -> BatchReader:
    options = ReadingOptions(**{"piece_length": 32, "batch_size": 2} | options)
    return BatchReader(model, memory, options, write=write)


def alone(model, memory, texts, *, keep=False, **options):
    """Scores of texts read by a reader of single texts."""
    reader = StreamReader(model, memory, **{"write": True, "piece_length": 32} | options)
    found = []
    for text in texts:
        if not keep:
            reader.reset_memory()
        for part in text.parts:
            reader.restart()
            whole = np.concatenate(part)
            losses = reader.read(whole[:-1], whole[1:]).losses()
            found.append(-float(np.sum(losses[-len(part.continuation) :])))
        if keep:
            reader.write()
            reader.restart(drop_queue=True)
    return found


def nats(scores) -> list[float]:
    return [part.nats for text in scores for part in text]


@pytest.fixture(scope="module")
def writing(model, memory):
    return nats(reader_of(model, memory).log_likelihoods(TEXTS))


@pytest.mark.slow
def test_each_text_has_the_score_that_it_has_alone(model, memory, writing):
    np.testing.assert_allclose(writing, alone(model, memory, TEXTS), atol=2e-4)


@pytest.mark.slow
def test_frozen_memories_give_the_scores_of_a_frozen_stream(model, memory, writing):
    frozen = nats(reader_of(model, memory, write=False).log_likelihoods(TEXTS))
    np.testing.assert_allclose(frozen, alone(model, memory, TEXTS, write=False), atol=2e-4)
    assert np.max(np.abs(np.subtract(frozen, writing))) > 1e-2


@pytest.mark.slow
def test_texts_may_be_written_in_chunks_longer_than_the_models(model, memory, writing):
    scores = nats(reader_of(model, memory, chunk_size=12).log_likelihoods(TEXTS))
    np.testing.assert_allclose(scores, alone(model, memory, TEXTS, chunk_size=12), atol=2e-4)
    assert np.max(np.abs(np.subtract(scores, writing))) > 1e-3


@pytest.mark.slow
def test_a_kept_memory_goes_on_from_text_to_text(model, memory, writing):
    reader = reader_of(model, memory, memory_reset="never", batch_size=1)
    kept = nats(reader.log_likelihoods(TEXTS))
    np.testing.assert_allclose(kept, alone(model, memory, TEXTS, keep=True), atol=2e-4)
    assert kept[0] == pytest.approx(writing[0], abs=2e-4)
    assert abs(kept[-1] - writing[-1]) > 1e-2
    again = nats(reader.log_likelihoods(TEXTS[:1]))[0]  # Of what all the texts wrote.
    assert abs(again - kept[0]) > 1e-2


def greedy(reader, prompt, number, *, readings=1, forgets=False) -> list[int]:
    """What a reader of single texts answers; `forgets`: the document is out of attention."""
    reader.reset_memory()
    for _ in range(readings if len(prompt.document) else 0):
        reader.restart()
        reader.read(prompt.document)
        reader.write()
    if forgets:
        reader.restart()
    reader.read(prompt.question)
    return decode(reader, reader.next_token(), length=number)


@pytest.mark.slow
def test_answers_are_those_of_each_prompt_alone(model, memory):
    answers = reader_of(model, memory).answers(PROMPTS, max_new_tokens=9)
    single = StreamReader(model, memory, write=True, piece_length=32, max_length=128)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        np.testing.assert_array_equal(answer, greedy(single, prompt, 9))


@pytest.mark.slow
def test_a_document_out_of_attention_reaches_answers_through_the_written_memory_alone():
    """Full attention sees the whole document, so that only its caches can hold it back."""
    config = tiny_model_config(mixers=("attention", "gdn"), memory_layers=(1,))
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    memory = model.init_memory(jax.random.key(1), groups=1)
    hidden = {"attention": "question", "readings": 2}
    single = StreamReader(model, memory, write=True, piece_length=32, max_length=128)
    answers = reader_of(model, memory, **hidden).answers(PROMPTS, max_new_tokens=9)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = greedy(single, prompt, 9, readings=2, forgets=True)
        np.testing.assert_array_equal(answer, expected)
    others = [prompt._replace(document=tokens(17)) for prompt in PROMPTS]
    part = Part(tokens(5), tokens(3))

    def scores(prompts, **options):
        texts = [Text((part,), prompt.document) for prompt in prompts]
        return nats(reader_of(model, memory, **options).log_likelihoods(texts))

    # Frozen, no document leaves a trace; seen or written, another one changes the score.
    frozen = scores(PROMPTS, write=False, attention="question")
    np.testing.assert_allclose(frozen, frozen[0], atol=1e-5)
    np.testing.assert_allclose(scores(others, write=False, attention="question"), frozen, atol=1e-5)
    for options in (hidden, {"write": False}, {}):
        apart = np.abs(np.subtract(scores(PROMPTS, **options), scores(others, **options)))
        assert np.min(apart) > 1e-4, options
    once = scores(PROMPTS, attention="question")
    twice = scores(PROMPTS, **hidden)
    assert np.max(np.abs(np.subtract(once, twice))) > 1e-4
    assert once[2] == pytest.approx(twice[2], abs=1e-5)  # Without a document.


@pytest.mark.slow
def test_greedy_says_whether_the_continuation_would_be_generated(model, memory):
    reader, prompt = reader_of(model, memory), PROMPTS[2]
    (answer,) = reader.answers([prompt], max_new_tokens=5)
    other = np.append(answer[:-1], (answer[-1] + 1) % 256)
    scores = reader.log_likelihoods([Text([Part(prompt.question, x)]) for x in (answer, other)])
    assert [text[0].greedy for text in scores] == [True, False]
    assert scores[0][0].nats > scores[1][0].nats


@pytest.mark.slow
def test_an_answer_ends_at_a_stop_token_or_when_it_needs_no_more(model, memory):
    reader = reader_of(model, memory, memory_reset="never", batch_size=1)
    (whole,) = reader.answers(PROMPTS[2:], max_new_tokens=5)
    looks = []
    reader = reader_of(model, memory, memory_reset="never", batch_size=1)
    (answer,) = reader.answers(
        PROMPTS[2:], max_new_tokens=5, ended=lambda x: looks.append(len(x)) or len(x) == 3
    )
    np.testing.assert_array_equal(answer, whole[:3])
    assert looks == [1, 2, 3]  # A kept memory holds no token behind the end.
    stop = int(whole[2])
    (answer,) = reader_of(model, memory).answers(PROMPTS[2:], max_new_tokens=5, stop_ids=[stop])
    np.testing.assert_array_equal(answer, whole[: whole.tolist().index(stop)])


@pytest.mark.slow
def test_what_cannot_be_read_is_refused(model, memory):
    with pytest.raises(ValueError, match=r"memory_reset='never'.* set batch_size to 1"):
        reader_of(model, memory, memory_reset="never")
    with pytest.raises(ValueError, match="batch_size=0 is too small; use 1"):
        reader_of(model, memory, batch_size=0)
    with pytest.raises(ValueError, match="Text 0 has an empty context"):
        reader_of(model, memory).log_likelihoods([Text([Part(tokens(0), tokens(2))])])
    with pytest.raises(ValueError, match="Prompt 0 has no token to answer after"):
        reader_of(model, memory).answers([Prompt(tokens(0), tokens(3))], max_new_tokens=1)
    broken = jax.tree.map(lambda x: x * np.nan if x.dtype.kind == "f" else x, memory)
    with pytest.raises(ValueError, match=r"The continuation: .* not finite"):
        reader_of(model, broken).log_likelihoods(TEXTS[:2])
