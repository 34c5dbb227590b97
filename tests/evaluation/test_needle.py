import re
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.evaluation import needle as needle_module
from fwpkm_jax.evaluation.haystack_reader import HaystackReader
from fwpkm_jax.evaluation.needle import (
    NeedleConfig,
    encode_prompt,
    needle_accuracy,
    score_answers,
)
from fwpkm_jax.evaluation.needle_samples import Needle, NeedleSample
from fwpkm_jax.evaluation.stream_calls import flush, reset_caches
from fwpkm_jax.evaluation.yarn import with_yarn
from fwpkm_jax.models.language_model import LanguageModel

BYTES = load_tokenizer("bytes")
TEXT = " ".join(f"word{i}" for i in range(40))
LENGTH = 30
CAPACITY = 64


def evaluate(model, memory, **options):
    config = NeedleConfig(**{"haystack_words": (10,), "samples": 3, "readings": (1, 2)} | options)
    return needle_accuracy(
        model, memory, config=config, texts=lambda: [("book", TEXT)], tokenizer=BYTES
    ).record


class Transcript:
    """Stands for a reader and a perfect model: keeps what was read and answers from it."""

    def __init__(self, model, memory, *, write, **sizes):
        self.writes, self.sizes = write, sizes
        self.calls: list[str] = []
        Transcript.last = self

    def reset_memory(self):
        self.calls.append("reset")
        self.text, self.read_since_restart = "", ""

    def restart(self):
        self.calls.append("restart")
        self.read_since_restart = ""

    def read(self, tokens):
        text = BYTES.decode(tokens)
        self.calls.append("question" if text.startswith(" The secret") else "haystack")
        self.text += text
        self.read_since_restart += text
        assert len(self.read_since_restart) <= self.sizes["max_length"]

    def write(self):
        self.calls.append("write")

    def next_token(self):
        self.calls.append("next_token")
        return 0

    def decode(self, first, *, length):
        self.calls.append("decode")
        key = self.text[-8:-4]
        return list(re.findall(rf"ID-{key} is (\d+)\.", self.text)[-1][:length].encode())


READING = ["restart", "haystack", "write"]
LAST = {
    "paper": ["restart", "haystack", "write", "question", "next_token", "decode"],
    "reference": ["restart", "haystack", "question", "next_token", "write", "decode"],
}


@pytest.mark.parametrize("mode", ["paper", "reference"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_perfect_reader_is_asked_in_the_order_of_the_protocol(
    model, memory, monkeypatch, mode, reset
):
    monkeypatch.setattr(needle_module, "HaystackReader", Transcript)
    record = evaluate(model, memory, mode=mode, reset_memory_between_samples=reset, readings=(3,))
    sample = [*READING, *READING, *LAST[mode]]
    again = ["reset"] if reset else []
    assert Transcript.last.calls == ["reset", *sample, *again, *sample, *again, *sample]
    (run,) = record["results"]["runs"]
    assert run["exact"]["accuracy"] == run["candidate"]["accuracy"] == 1
    assert run["digits"] == 6
    assert record["provenance"]["resets"]["memory"] == ("sample" if reset else "never")
    assert record["provenance"]["scored_tokens"] == 18


def test_scores_follow_the_definitions():
    needles = (Needle("00aa", "123456", 5.0, 0), Needle("00bb", "654321", 95.0, 9))
    samples = [
        NeedleSample("", "", needles[i].value, needles, i, "book", 10) for i in (0, 0, 0, 1, 1)
    ]
    scores = score_answers(samples, ["123456", " 12345", "654321", "6543x1", "12"])
    # Right; shifted by one, so no digit in place; another needle's; one digit off; cut short.
    assert [r["exact"] for r in scores["samples"]] == [True, False, False, False, False]
    assert [r["digits"] for r in scores["samples"]] == [6, 0, 0, 5, 0]
    assert [r["candidate"] for r in scores["samples"]] == [True, False, True, False, False]
    assert scores["exact"]["accuracy"] == 0.2
    assert scores["digits"] == pytest.approx(11 / 5)
    depths = {d["from"]: (d["accuracy"], d["answers"]) for d in scores["by_depth"]}
    assert depths == {0: (pytest.approx(1 / 3), 3), 90: (0, 2)}


def test_a_padded_answer_counts_as_exact_once_stripped():
    sample = NeedleSample("", "", "12", (Needle("0", "12", 0.0, 0),), 0, "book", 10)
    scores = score_answers([sample], ["12 "])
    assert scores["exact"]["accuracy"] == 1
    assert scores["candidate"]["accuracy"] == 0


@pytest.mark.parametrize("name", ["bytes", "mistral-v1"])
def test_haystack_and_question_make_up_the_whole_prompt(name):
    tokenizer = load_tokenizer(name)
    question = " The secret number for ID-12ab is "
    sample = NeedleSample("Some words.", question, "1", (), 0, "book", 2)
    prompt = encode_prompt(sample, tokenizer)
    joined = np.concatenate(prompt)
    np.testing.assert_array_equal(joined, tokenizer.encode(sample.haystack + question))
    assert tokenizer.decode(prompt.haystack) == sample.haystack
    # The first piece of an answer is a bare digit: the space before it has been read.
    np.testing.assert_array_equal(
        tokenizer.encode(sample.haystack + question + "7")[: len(joined)], joined
    )


@partial(jax.jit, static_argnames=("graphdef", "chunk_size"))
def read_whole(graphdef, params, stream, tokens, *, chunk_size):
    out = nnx.merge(graphdef, params).stream(tokens, stream, chunk_size=chunk_size)
    return out.logits, out.stream


def reader_of(model, memory, **options) -> HaystackReader:
    sizes = {"capacity": CAPACITY, "max_length": CAPACITY, "piece_length": 16}
    return HaystackReader(model, memory, vocab_size=257, **{**sizes, "write": True, **options})


def test_a_reading_in_pieces_writes_one_chunk_of_the_texts_length(model, memory):
    tokens = np.random.default_rng(0).integers(8, size=LENGTH).astype(np.int32)
    question = np.arange(5, dtype=np.int32)
    graphdef, params = nnx.split(model)
    stream = model.init_stream(memory, batch=1, max_length=CAPACITY, max_chunk_size=LENGTH)
    reader = reader_of(model, memory)
    for _ in range(2):
        stream = reset_caches(graphdef, params, stream, pending=False)
        _, stream = read_whole(graphdef, params, stream, tokens[None], chunk_size=LENGTH)
        stream = flush(graphdef, params, stream)
        reader.restart()
        reader.read(tokens)
        reader.write()
    logits, stream = read_whole(graphdef, params, stream, question[None], chunk_size=LENGTH)
    reader.read(question)
    assert reader.next_token() == int(np.argmax(logits[0, -1]))
    for ours, expected in zip(
        jax.tree.leaves(reader.stream.memory), jax.tree.leaves(stream.memory), strict=True
    ):
        np.testing.assert_allclose(ours, expected, atol=2e-5)
        assert np.max(np.abs(ours - jax.tree.leaves(memory)[0].ravel()[0])) > 0


def test_reading_writes_only_when_told_and_only_where_allowed(model, memory):
    tokens = np.random.default_rng(0).integers(8, size=LENGTH).astype(np.int32)

    def moved(reader: HaystackReader) -> float:
        change = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), reader.stream.memory, memory)
        return max(jax.tree.leaves(change))

    reader = reader_of(model, memory)
    reader.read(tokens)
    assert moved(reader) == 0
    reader.write()
    assert moved(reader) > 1e-3
    reader.reset_memory()
    assert moved(reader) == 0
    frozen = reader_of(model, memory, write=False)
    frozen.read(tokens)
    frozen.write()
    assert moved(frozen) == 0


def test_decoding_is_greedy(model, memory):
    reader = reader_of(model, memory)
    reader.read(np.arange(6))
    first = reader.next_token()
    decoded = reader.decode(first, length=3)
    for count in (1, 2):
        again = reader_of(model, memory)
        again.read(np.concatenate([np.arange(6), decoded[:count]]))
        assert again.next_token() == decoded[count]


def test_a_real_model_is_evaluated_the_same_twice_and_its_settings_are_recorded(model, memory):
    record = evaluate(model, memory, yarn_factor=4.0, readings=(1, 3), piece_length=16)
    again = evaluate(model, memory, yarn_factor=4.0, readings=(1, 3), piece_length=16)
    assert record["results"] == again["results"]
    assert [run["readings"] for run in record["results"]["runs"]] == [1, 3]
    assert record["provenance"]["yarn"]["factor"] == 4
    assert record["provenance"]["yarn"]["original_length"] == 1024


def test_every_length_and_number_of_readings_starts_afresh(model, memory, monkeypatch):
    monkeypatch.setattr(needle_module, "HaystackReader", Transcript)
    record = evaluate(model, memory, haystack_words=(10, 20), readings=(1, 2), samples=1)
    runs = [(run["words"], run["readings"]) for run in record["results"]["runs"]]
    assert runs == [(10, 1), (10, 2), (20, 1), (20, 2)]
    assert Transcript.last.calls.count("reset") == 2
    lengths = [run["token_length"]["mean"] for run in record["results"]["runs"]]
    assert lengths[2] == lengths[3] > lengths[0]


def test_yarn_changes_attention_and_no_parameter(model, memory):
    stretched = with_yarn(model, factor=8.0, original_length=16)
    same = with_yarn(model, factor=None, original_length=16)
    assert same is model
    tokens = np.arange(24, dtype=np.int32)[None]

    def logits(model: LanguageModel):
        graphdef, params = nnx.split(model)
        read = jax.jit(
            lambda params: nnx.merge(graphdef, params)(jax.numpy.asarray(tokens), memory)
        )
        return read(params).logits

    jax.tree.map(np.testing.assert_array_equal, nnx.split(model)[1], nnx.split(stretched)[1])
    assert np.max(np.abs(logits(model) - logits(stretched))) > 1e-4


def test_a_text_too_short_for_any_haystack_is_refused(model, memory):
    with pytest.raises(ValueError, match="500 words that a haystack of 1000 needs"):
        evaluate(model, memory, haystack_words=(1000,))


@pytest.mark.parametrize("field", ["samples", "piece_length", "value_digits"])
def test_options_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        NeedleConfig(**{field: 0})


@pytest.mark.parametrize("field", ["readings", "haystack_words"])
def test_an_empty_list_of_runs_is_refused(field):
    with pytest.raises(ValueError, match=re.escape(f"{field}=()")):
        NeedleConfig(**{field: ()})
