import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.evaluation import NeedleConfig
from fwpkm_jax.evaluation.needle import needle_views, reading
from fwpkm_jax.evaluation.needle.config import SampleSettings
from fwpkm_jax.evaluation.needle.needle import NEEDLE, describe_chunks
from fwpkm_jax.evaluation.needle.reading import encode_prompt
from fwpkm_jax.evaluation.needle.samples import Needle, NeedleSample, build_samples
from fwpkm_jax.evaluation.needle.scores import score_answers
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader, decode, flush, reset_caches
from fwpkm_jax.evaluation.reconfigure import with_yarn
from fwpkm_jax.models.language_model import LanguageModel
from tests.evaluation.conftest import tiny_model_config

BYTES = load_tokenizer("bytes")
TEXT = " ".join(f"word{i}" for i in range(40))
LENGTH = 30
CAPACITY = 64


def evaluate(model, memory, given=None, **options):
    config = NeedleConfig(**{"haystack_words": (10,), "samples": 3, "readings": (1, 2)} | options)
    inputs = {"texts": lambda: [("book", TEXT)], "samples": given, "tokenizer": BYTES}
    return NEEDLE.of_model(model, memory, config=config, **inputs).record


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


@pytest.fixture
def perfect_reader(monkeypatch):
    monkeypatch.setattr(reading, "StreamReader", Transcript)
    monkeypatch.setattr(reading, "decode", Transcript.decode)


def moved(reader: StreamReader, memory) -> float:
    change = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), reader.stream.memory, memory)
    return max(jax.tree.leaves(change))


READING = ["restart", "haystack", "write"]
LAST = {
    "paper": ["restart", "haystack", "write", "question", "next_token", "decode"],
    "reference": ["restart", "haystack", "question", "next_token", "write", "decode"],
}


@pytest.mark.by_default("False-reference", "True-paper", "True-reference")
@pytest.mark.parametrize("mode", ["paper", "reference"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_perfect_reader_is_asked_in_the_order_of_the_protocol(
    model, memory, perfect_reader, mode, reset
):
    record = evaluate(model, memory, mode=mode, reset_memory_between_samples=reset, readings=(3,))
    sample = [*READING, *READING, *LAST[mode]]
    again = ["reset"] if reset else []
    assert Transcript.last.calls == ["reset", *sample, *again, *sample, *again, *sample]
    (run,) = record["results"]["runs"]
    assert run["exact"]["accuracy"] == run["candidate"]["accuracy"] == 1
    assert run["digits"] == 6
    assert record["provenance"]["resets"]["memory"] == ("sample" if reset else "never")
    assert record["provenance"]["scored_tokens"] == 18


@pytest.mark.parametrize(("mode", "ends"), [("paper", True), ("reference", False)])
def test_with_chunks_of_a_fixed_size_only_the_paper_mode_writes_the_end_of_a_reading(
    model, memory, perfect_reader, mode, ends
):
    record = evaluate(model, memory, mode=mode, chunk_size="model", readings=(2,), samples=1)
    left_out = () if ends else ("write",)
    expected = ["reset", *READING, *LAST[mode]]
    assert Transcript.last.calls == [call for call in expected if call not in left_out]
    assert Transcript.last.sizes["chunk_size"] == model.config.fast_weight.chunk_size
    assert record["provenance"]["chunk_size"] == model.config.fast_weight.chunk_size


@pytest.mark.slow
def test_a_reader_of_fixed_chunks_writes_as_they_fill(model, memory):
    tokens = np.random.default_rng(0).integers(8, size=9).astype(np.int32)
    reader = reader_of(model, memory, chunk_size=4)
    reader.read(tokens[:4])
    assert moved(reader, memory) == 0
    reader.read(tokens[4:])
    assert moved(reader, memory) > 1e-3


@pytest.mark.slow
def test_fast_weights_are_rounded_between_calls_where_asked(model, memory):
    tokens = np.random.default_rng(0).integers(8, size=9).astype(np.int32)
    rounded = reader_of(model, memory, fast_weight_dtype="bfloat16")
    rounded.read(tokens)
    rounded.write()
    for leaf in jax.tree.leaves(rounded.stream.memory):
        np.testing.assert_array_equal(leaf, leaf.astype(jax.numpy.bfloat16).astype(leaf.dtype))
    assert moved(rounded, memory) > 1e-3


def test_more_tokens_than_there_is_room_for_are_refused(model, memory):
    reader = reader_of(model, memory, capacity=8)
    with pytest.raises(ValueError, match="10 tokens wait for a write and there is room for 9"):
        reader.read(np.zeros(10, np.int32))


@pytest.mark.parametrize(
    ("words", "factor"), [(500, None), (4000, None), (8000, 4), (9000, 8), (32_000, 16), (1e6, 64)]
)
def test_positions_are_stretched_as_in_the_paper(words, factor):
    assert NeedleConfig().factor(words) == factor
    assert NeedleConfig(yarn_factor=3.0).factor(words) == 3
    assert NeedleConfig(yarn_factor=None).factor(words) is None


def test_what_a_model_without_override_writes_is_told(model):
    lact = tiny_model_config(mixers=("lact",), memory_layers=())
    assert "it has no override" in describe_chunks(lact, NeedleConfig())
    plain = tiny_model_config(memory_layers=())
    assert describe_chunks(plain, NeedleConfig()) == "nothing is written: the model has no memory"
    assert describe_chunks(model.config, NeedleConfig(chunk_size=3)) == 3


def test_models_with_one_seed_are_asked_the_same(model, memory, perfect_reader):
    made = list(build_samples([("book", TEXT)], SampleSettings(depths=(0, 50)), words=10, seed=5))
    options = {"seed": 5, "depths": (0.0, 50.0), "readings": (1,)}
    (run,) = evaluate(model, memory, **options)["results"]["runs"]
    assert (run["words"], run["sample_seed"]) == (10, 5)
    assert [sample["expected"] for sample in run["samples"]] == [s.answer for s in made[:3]]


def test_answers_to_given_samples_are_as_long_as_their_numbers(model, memory, perfect_reader):
    settings = SampleSettings(value_digits=4)
    made = list(build_samples([("book", TEXT)], settings, words=10, seed=0))[:2]
    record = evaluate(model, memory, {10: made}, readings=(1,))
    (run,) = record["results"]["runs"]
    assert [len(sample["answer"]) for sample in run["samples"]] == [4, 4]
    assert run["exact"]["accuracy"] == 1
    assert record["provenance"]["scored_tokens"] == 8
    assert "digits of 4" in needle_views.table(record)


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
    assert [r["others"] for r in scores["samples"]] == 3 * [["654321"]] + 2 * [["123456"]]
    assert scores["exact"]["accuracy"] == 0.2
    assert scores["digits"] == pytest.approx(11 / 5)
    assert scores["progress"] == [1, 1, 1, 1, 1]
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
    joined = np.concatenate([prompt.haystack, prompt.question])
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


def reader_of(model, memory, **options) -> StreamReader:
    sizes = {"capacity": CAPACITY, "max_length": CAPACITY, "piece_length": 16}
    defaults = sizes | {"vocab_size": 257, "write": True, "chunk_size": "flush"}
    return StreamReader(model, memory, **(defaults | options))


@pytest.mark.slow
def test_a_reading_in_pieces_writes_one_chunk_of_the_texts_length(model, memory):
    tokens = np.random.default_rng(0).integers(8, size=LENGTH).astype(np.int32)
    question = np.arange(5, dtype=np.int32)
    graphdef, params = nnx.split(model)
    copy = jax.tree.map(jnp.copy, memory)  # The stream's buffers are reused.
    stream = model.init_stream(copy, batch=1, max_length=CAPACITY, max_chunk_size=LENGTH)
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
    assert moved(reader, memory) > 1e-3


@pytest.mark.thorough
def test_reading_writes_only_when_told_and_only_where_allowed(model, memory):
    tokens = np.random.default_rng(0).integers(8, size=LENGTH).astype(np.int32)

    reader = reader_of(model, memory)
    reader.read(tokens)
    assert moved(reader, memory) == 0
    reader.write()
    assert moved(reader, memory) > 1e-3
    reader.reset_memory()
    assert moved(reader, memory) == 0
    frozen = reader_of(model, memory, write=False)
    frozen.read(tokens)
    frozen.write()
    assert moved(frozen, memory) == 0


@pytest.mark.slow
def test_decoding_is_greedy(model, memory):
    reader = reader_of(model, memory)
    reader.read(np.arange(6))
    first = reader.next_token()
    decoded = decode(reader, first, length=3)
    for count in (1, 2):
        again = reader_of(model, memory)
        again.read(np.concatenate([np.arange(6), decoded[:count]]))
        assert again.next_token() == decoded[count]


@pytest.mark.slow
def test_a_real_model_is_evaluated_the_same_twice_and_its_settings_are_recorded(model, memory):
    record = evaluate(model, memory, yarn_factor=4.0, readings=(1, 3), piece_length=16)
    again = evaluate(model, memory, yarn_factor=4.0, readings=(1, 3), piece_length=16)
    assert record["results"] == again["results"]
    assert [run["readings"] for run in record["results"]["runs"]] == [1, 3]
    assert record["provenance"]["yarn"]["factor"] == 4
    assert record["provenance"]["yarn"]["original_length"] == 1024


def test_every_length_and_number_of_readings_starts_afresh(model, memory, perfect_reader):
    record = evaluate(model, memory, haystack_words=(10, 20), readings=(1, 2), samples=1)
    runs = [(run["words"], run["readings"]) for run in record["results"]["runs"]]
    assert runs == [(10, 1), (10, 2), (20, 1), (20, 2)]
    assert Transcript.last.calls.count("reset") == 2
    lengths = [run["token_length"]["mean"] for run in record["results"]["runs"]]
    assert lengths[2] == lengths[3] > lengths[0]


@pytest.mark.slow
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


@pytest.mark.parametrize("field", ["samples", "piece_length", "chunk_size"])
def test_options_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        NeedleConfig(**{field: 0})


@pytest.mark.parametrize("field", ["readings", "haystack_words"])
def test_an_empty_list_of_runs_is_refused(field):
    with pytest.raises(ValueError, match=re.escape(f"{field}=()")):
        NeedleConfig(**{field: ()})
