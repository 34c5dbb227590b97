import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import matplotlib.image
import numpy as np
import optax
import pytest
from flax import nnx

from fwpkm_jax.data import TextData, load_tokenizer
from fwpkm_jax.evaluation import EVALS, Subject, run_suite
from fwpkm_jax.evaluation.readers.stream_reader import PieceReading, Reading, StreamReader
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.paper.evaluation import longbench_views as views
from fwpkm_jax.paper.evaluation.longbench import (
    LONGBENCH,
    LongBenchConfig,
    QuestionTokens,
    read_sample,
    tokenize_task,
)
from fwpkm_jax.rules import FwMLP, FwPKM
from tests.evaluation.conftest import tiny_model_config

BYTES = load_tokenizer("bytes")
PIECE = 1  # Compiles least; that longer pieces change nothing is tested with the needles.


def sample(context: int, question: int, answer: int, seed: int = 0) -> QuestionTokens:
    tokens = np.random.default_rng(seed).integers(8, size=context + question + answer)
    parts = np.split(tokens.astype(np.int32), [context, context + question])
    return QuestionTokens(str(seed), *parts)


def tiny_model(rule=None) -> LanguageModel:
    rule = rule or FwPKM(num_subkeys=4, key_dim=8, value_dim=8, top_k=2)
    fast_weight = FastWeightConfig(rule=rule, chunk_size=8)
    config = tiny_model_config(mixers=("swa",), memory_layers=(0,), fast_weight=fast_weight)
    return LanguageModel(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def memory(model):
    return model.init_memory(jax.random.key(1))


@partial(jax.jit, static_argnames=("graphdef", "chunk_size"))
def stream_whole(graphdef, params, memory, tokens, *, chunk_size):
    """The protocol's own words: one call over everything with the chunk size of the context."""
    model = nnx.merge(graphdef, params)
    length = tokens.shape[1] - 1
    stream = model.init_stream(memory, batch=1, max_length=length, max_chunk_size=chunk_size)
    out = model.stream(tokens[:, :-1], stream, chunk_size=chunk_size)
    losses = optax.softmax_cross_entropy_with_integer_labels(out.logits, tokens[:, 1:])
    return losses[0], out.stream.memory


def expected(model, memory, sample):
    tokens, chunk_size = np.concatenate(sample[1:])[None], len(sample.context)
    losses, memory = stream_whole(*nnx.split(model), memory, tokens, chunk_size=chunk_size)
    return np.asarray(losses)[-len(sample.answer) :], memory


def assert_same(actual, wanted):
    np.testing.assert_allclose(actual[0], wanted[0], rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), actual[1], wanted[1])


@pytest.mark.slow
def test_a_sample_in_pieces_equals_one_pass_with_the_contexts_length_as_chunk_size(model, memory):
    one = sample(19, 6, 3)
    actual = read_sample(model, memory, one, piece_length=PIECE, write=True)
    assert_same(actual, expected(model, memory, one))
    frozen, same = read_sample(model, memory, one, piece_length=PIECE, write=False)
    assert np.max(np.abs(actual[0] - frozen)) > 1e-3
    jax.tree.map(np.testing.assert_array_equal, same, memory)


class Transcript(StreamReader):
    """Notes what is read, scored and written, and does none of it."""

    def __init__(self, *_, chunk_size, **options):
        self.chunk_size, self.calls = chunk_size, []
        self._stream = None
        Transcript.last = self

    def read(self, tokens, labels=None):
        self.calls.append(("read" if labels is None else "score", len(tokens)))
        piece = PieceReading(np.zeros(len(tokens)), None, {}, {})
        return Reading([piece], len(tokens), last=len(tokens) - 1)

    def write(self):
        self.calls.append("write")

    @property
    def stream(self):
        return type("", (), {"memory": None})


def calls_for(monkeypatch, model, one: QuestionTokens) -> list:
    monkeypatch.setattr("fwpkm_jax.paper.evaluation.longbench.StreamReader", Transcript)
    read_sample(model, None, one, piece_length=PIECE, write=True)
    return Transcript.last.calls


def test_the_write_comes_one_question_token_behind_the_context(model, monkeypatch):
    calls = calls_for(monkeypatch, model, sample(19, 6, 3))
    # The last question token predicts the first answer token; the last answer token is no input.
    assert calls == [("read", 20), "write", ("read", 4), ("score", 3)]


def test_a_context_shorter_than_what_follows_is_followed_by_another_write(model, monkeypatch):
    calls = calls_for(monkeypatch, model, sample(5, 6, 4))
    assert calls == [("read", 6), "write", ("read", 4), ("score", 1), "write", ("score", 3)]


def test_fwmlp_keeps_its_chunk_size(monkeypatch):
    model = tiny_model(FwMLP(key_dim=8, value_dim=8, hidden_dim=8))
    assert calls_for(monkeypatch, model, sample(19, 6, 3)) == [("read", 24), ("score", 3)]
    assert Transcript.last.chunk_size is None  # The model's.


def evaluate(model, memory, samples, **options):
    config = LongBenchConfig(**{"piece_length": PIECE, "yarn_factor": None} | options)
    return LONGBENCH.of_model(model, memory, config=config, samples=samples)


SAMPLES = {
    "hotpotqa": [sample(19, 6, 3), sample(12, 5, 1, seed=1)],
    "musique": [sample(12, 5, 1, seed=1)],
}


@pytest.fixture(scope="module")
def result(model, memory):
    return evaluate(model, memory, SAMPLES)


@pytest.mark.slow
def test_perplexity_weighs_answer_tokens_and_every_task_starts_anew(model, memory, result):
    first, after = expected(model, memory, SAMPLES["hotpotqa"][0])
    second, _ = expected(model, after, SAMPLES["hotpotqa"][1])
    alone, _ = expected(model, memory, SAMPLES["musique"][0])
    results = result.record["results"]
    carried = float(np.mean([*first, *second]))
    scored = results["writing"]["hotpotqa"]
    assert scored["loss"] == pytest.approx(carried, abs=2e-5)
    assert scored["perplexity"] == pytest.approx(np.exp(carried), rel=1e-4)
    assert results["writing"]["musique"]["loss"] == pytest.approx(float(np.mean(alone)), abs=2e-5)
    # The second sample is read with what the first one wrote.
    assert abs(second[0] - alone[0]) > 1e-4
    assert result.record["provenance"]["scored_tokens"] == 5
    np.testing.assert_array_equal(result.arrays["sample"], [0, 0, 0, 1, 0])
    np.testing.assert_array_equal(result.arrays["position"], [0, 1, 2, 0, 0])


@pytest.mark.slow
def test_writing_and_frozen_are_compared_on_the_same_tokens(result):
    on, off = (result.arrays[f"loss_{name}"] for name in ("writing", "frozen"))
    difference = result.record["results"]["difference"]
    assert difference["hotpotqa"]["loss"] == pytest.approx(np.mean((on - off)[:4]), abs=1e-6)
    low, high = difference["hotpotqa"]["interval"]
    assert low < difference["hotpotqa"]["loss"] < high
    assert difference["musique"]["interval"] is None  # Of one sample.


@pytest.mark.slow
def test_the_memory_may_start_anew_in_every_sample(model, memory, result):
    reset = evaluate(model, memory, SAMPLES, memory_reset="sample", write="on")
    assert reset.record["provenance"]["resets"]["memory"] == "sample"
    losses = reset.arrays["loss_writing"]
    assert losses[3] == losses[4] != result.arrays["loss_writing"][3]


@pytest.mark.slow
def test_fast_weights_may_be_rounded_between_samples(model, memory, result):
    config = LongBenchConfig(piece_length=PIECE, yarn_factor=None, write="on")
    rounded = LONGBENCH.of_model(
        *(model, memory), config=config, samples=SAMPLES, fast_weight_dtype="bfloat16"
    )
    assert rounded.record["provenance"]["fast_weight_dtype"] == "bfloat16"
    difference = np.abs(rounded.arrays["loss_writing"] - result.arrays["loss_writing"])
    assert 1e-6 < np.max(difference) < 0.1


def test_positions_are_stretched_and_said(model, memory, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fwpkm_jax.paper.evaluation.longbench.read_sample",
        lambda model, memory, one, **_: (
            seen.append(model.config.attention.yarn) or np.zeros(len(one.answer)),
            memory,
        ),
    )
    provenance = evaluate(model, memory, SAMPLES, yarn_factor=20.0).record["provenance"]
    assert provenance["yarn"]["factor"] == seen[0].factor == 20.0
    assert provenance["yarn"]["original_length"] == 1024


def test_lact_is_refused():
    config = tiny_model_config(mixers=("lact",), memory_layers=(), model_dim=24)
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="LaCT has no memory that is written once a text"):
        evaluate(model, {}, SAMPLES)


def record(context: str, answers: list[str], **changes) -> str:
    fields = {"context": context, "input": "Who?", "answers": answers, "length": 3}
    return json.dumps(fields | {"language": "en", "_id": context} | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [
        record("one", ["a", "a longer one"]),
        record("zwei", ["b"], language="de"),
        record("three" * 40, ["c"]),
        record("four", ["dd"]),
    ]
    (tmp_path / "musique.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_samples_beyond_the_limits_are_left_out(folder):
    config = LongBenchConfig(data=str(folder), max_tokens=400)
    chosen = tokenize_task(config, "musique", BYTES)
    assert [one.id for one in chosen] == ["one", "four"]
    assert BYTES.decode(chosen[0].answer) == "a"
    # Every part is tokenised apart and nothing is added.
    assert BYTES.decode(chosen[0].context).endswith("\nContext:\none\n")
    assert BYTES.decode(chosen[0].question).endswith("Question:\nWho?\nAnswer:\n")
    limited = dataclasses.replace(config, max_samples=1)
    assert len(tokenize_task(limited, "musique", BYTES)) == 1


@pytest.mark.slow
def test_the_suite_reads_a_folder_and_writes_everything(model, memory, folder, capsys):
    data = TextData(train_paths=("unused.txt",), length=16)
    subject = Subject(
        model=model, memory=memory, data=data, lifetime="carried", groups=1, batch_size=2
    )
    assert "longbench.data" in EVALS["longbench"].missing(subject, LongBenchConfig())
    with pytest.raises(ValueError, match="name LongBench"):
        EVALS["longbench"].run(subject, LongBenchConfig())
    with pytest.raises(ValueError, match="no sample of musique is left"):
        EVALS["longbench"].run(
            subject, LongBenchConfig(data=str(folder), tasks=("musique",), max_tokens=9)
        )
    options = LongBenchConfig(
        data=str(folder), tasks=("musique",), max_tokens=400, yarn_factor=None, piece_length=PIECE
    )
    run_suite(subject, ("longbench",), directory=folder / "out", configs={"longbench": options})
    written = json.loads((folder / "out" / "longbench.json").read_text())
    assert list(written["provenance"]["data_files"]) == [str(folder / "musique.jsonl")]
    assert written["provenance"]["scored_tokens"] == 3
    assert "each task, no YaRN" in capsys.readouterr().out


@pytest.mark.slow
def test_table_and_picture_show_every_task(result, tmp_path):
    table = views.table(result.record)
    for task, scored in result.record["results"]["writing"].items():
        (row,) = (line for line in table.splitlines() if line.startswith(task))
        assert f"{scored['perplexity']:.4f}" in row
    (path,) = views.plot(result.record, tmp_path)
    image = matplotlib.image.imread(path)[..., :3]
    assert np.mean(np.any(image < 0.9, axis=-1)) > 0.01


@pytest.mark.parametrize("options", [{"tasks": ("qasper",)}, {"tasks": ()}, {"max_tokens": 0}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LongBenchConfig(**options)
