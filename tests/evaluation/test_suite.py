import dataclasses
import hashlib
import inspect
import json
import os
import re
import typing
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.cli import main
from fwpkm_jax.cli.eval_command import options_type
from fwpkm_jax.config import Experiment
from fwpkm_jax.data import RecallData, TextData, TokenFile
from fwpkm_jax.evaluation import EVALS, Subject, choose_suite, run_suite
from fwpkm_jax.evaluation.display.tables import format_table
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.sources import sha256, text_sources
from fwpkm_jax.interchange import Weights, start_run
from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig, Checkpoints
from fwpkm_jax.training.state import MemoryConfig, init_state
from fwpkm_jax.training.training_config import TrainingConfig
from tests.data.plain_writer import write_token_file
from tests.evaluation.conftest import tiny_model_config

RECALL = RecallData(
    length=24, num_facts=2, num_keys=4, num_values=4, num_filler=4, min_distance=8, num_valid=8
)


@pytest.fixture
def text(tmp_path: Path) -> TextData:
    for name, words in (("a", 60), ("b", 20)):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"{name}{i % 7}" for i in range(words)))
    paths = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    return TextData(train_paths=paths, valid_paths=paths, length=16)


@pytest.fixture
def subject(model, memory, text) -> Subject:
    return Subject(
        model=model, memory=memory, data=text, lifetime="carried", groups=1, batch_size=2
    )


@pytest.fixture
def recall_subject(subject) -> Subject:
    return dataclasses.replace(subject, data=RECALL)


@pytest.mark.parametrize("name", EVALS)
def test_an_evaluation_says_what_it_asks_to_a_reader_without_the_paper(name):
    evaluation = EVALS[name]
    titles = [one.title for one in EVALS.values()]
    assert evaluation.title
    assert titles.count(evaluation.title) == 1
    sentences = re.split(r"(?<=[.;]) ", evaluation.about)
    assert len(sentences) >= 2
    assert all(len(sentence.split()) > 4 for sentence in sentences)
    assert evaluation.about.endswith(".")
    assert not re.search(r"\b(paper|FwPKM|FwMLP|[Ff]igure|[Tt]able \d)\b", evaluation.about)


@pytest.mark.parametrize("name", EVALS)
def test_an_evaluation_that_reports_recall_says_its_controls(name):
    evaluation = EVALS[name]
    source = Path(inspect.getfile(evaluation.evaluate))
    files = [source] if source.parent.name == "evaluation" else source.parent.glob("*.py")
    reports = any(re.search(r'"(accuracy|exact)"|import share', file.read_text()) for file in files)
    assert (evaluation.controls is not None) == reports
    assert ("fwpkm audit RUN" in evaluation.controls_line()) == reports


@pytest.mark.thorough
def test_default_suites_suit_the_data(subject, recall_subject):
    assert choose_suite((), recall_subject) == ("recall",)
    assert choose_suite((), subject) == ("ppl",)
    assert choose_suite(("needle", "ppl"), subject) == ("needle", "ppl")


def test_all_is_what_suits_the_data_and_lacks_nothing(subject, recall_subject, text, caplog):
    assert "recall" in choose_suite(("all",), recall_subject)
    chosen = choose_suite(("all",), subject)
    assert {"ppl", "needle"} <= set(chosen)
    assert "recall" not in chosen
    without = dataclasses.replace(subject, data=dataclasses.replace(text, valid_paths=()))
    chosen = choose_suite(("all",), without)
    assert not {"ppl", "needle"} & set(chosen)
    assert "skipped needle, which lacks a text (no --data PATH" in caplog.text
    given = dataclasses.replace(without, text_paths=text.valid_paths)
    assert {"ppl", "needle"} <= set(choose_suite(("all",), given))


def test_an_unknown_evaluation_is_refused_with_the_nearest_name(subject):
    with pytest.raises(ValueError, match=r"'needel' is none of .*nearest name is needle"):
        choose_suite(("needel",), subject)


@pytest.mark.parametrize("name", ["ppl", "needle"])
def test_text_evaluations_refuse_runs_on_generated_data(name, recall_subject):
    with pytest.raises(ValueError, match=f"{name} evaluates runs on text.*choose among recall"):
        choose_suite((name,), recall_subject)


def test_recall_refuses_runs_on_text(subject):
    with pytest.raises(ValueError, match="recall evaluates runs on questions"):
        choose_suite(("recall",), subject)


def test_every_evaluation_has_defaults_and_a_limit_among_its_options():
    for name, evaluation in EVALS.items():
        fields = {field.name for field in dataclasses.fields(evaluation.config)}
        assert evaluation.limit in fields, name
        assert evaluation.config() == evaluation.config()


@pytest.mark.thorough
def test_perplexity_writes_everything_with_its_provenance(subject, text, tmp_path, capsys):
    results = run_suite(subject, ("ppl",), directory=tmp_path / "results", limit=1)
    record = json.loads((tmp_path / "results" / "ppl.json").read_text())
    assert record == results["ppl"].record
    provenance = record["provenance"]
    assert provenance["tokenizer"] == "bytes"
    assert provenance["chunk_size"] == 8
    assert provenance["fast_weight_dtype"] == "float32"
    assert provenance["resets"]["memory"] == "never"
    assert provenance["mode"] == "protocol=default, segment_length=16"
    for path in text.valid_paths:
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        assert provenance["data_files"][path] == digest
    # All tokens but the first, the end of the document among them.
    scored = sum(len(Path(path).read_bytes()) for path in text.valid_paths)
    assert provenance["scored_tokens"] == scored
    arrays = np.load(tmp_path / "results" / "ppl.npz")
    assert arrays["loss_writing"].shape == (scored,)
    assert (tmp_path / "results" / "ppl.png").stat().st_size > 0
    shown = capsys.readouterr().out
    perplexity = record["results"]["writing"]["all"]["perplexity"]
    assert f"{perplexity:.4f}" in shown
    assert "layer_1" in shown


@pytest.mark.slow
def test_needles_are_hidden_in_the_runs_text(subject, tmp_path, capsys):
    options = EVALS["needle"].config(haystack_words=(20,), readings=(1,), piece_length=16)
    run_suite(subject, ("needle",), directory=tmp_path, configs={"needle": options}, limit=1)
    (run,) = json.loads((tmp_path / "needle.json").read_text())["results"]["runs"]
    assert [sample["document"] for sample in run["samples"]] == ["a.txt"]
    shown = capsys.readouterr().out
    assert "Needle in a haystack (mode paper, memory never reset)" in shown
    assert "\nControls: none. fwpkm audit RUN checks where answers come from.\n" in shown
    assert (tmp_path / "needle.png").is_file()


def test_other_texts_replace_the_runs_own(subject, recall_subject, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Something else.")
    (source,) = text_sources(dataclasses.replace(subject, text_paths=(str(other),)).text)
    (document,) = source.documents()
    assert bytes(document.tokens[:-1].astype(np.uint8)) == b"Something else."
    assert list(source.files) == [str(other)]
    assert len(list(source.documents())) == 1  # A second pass starts anew.
    with pytest.raises(ValueError, match=r"data=other\.txt: recall reads no text; leave it out"):
        choose_suite((), dataclasses.replace(recall_subject, text_paths=("other.txt",)))


def test_a_tokenised_file_is_known_by_both_its_hashes(text, tmp_path):
    path = tmp_path / "tokens.bin"
    write_token_file(path, [np.arange(5, dtype=np.int32)], vocab_size=257)
    assert TokenFile(path, vocab_size=257).num_entries == 1
    (source,) = text_sources(dataclasses.replace(text, valid_paths=(str(path),)))
    assert [Path(name).suffix for name in source.files] == [".bin", ".idx"]


def test_only_files_of_a_disk_are_hashed(tmp_path):
    """A pipe or a device would have no end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OutsideFileError, match="is no file of bytes on a disk; name a file"):
            sha256(path)
    (tmp_path / "file").write_bytes(b"ab" * 2**20)
    assert sha256(tmp_path / "file") == hashlib.sha256(b"ab" * 2**20).hexdigest()


def test_a_run_without_validation_text_is_refused(text):
    with pytest.raises(ValueError, match=r"as in --data PATH"):
        text_sources(dataclasses.replace(text, valid_paths=()))


def test_columns_are_aligned():
    table = format_table(["data", "tokens"], [["a", "1,000"], ["books", "7"]])
    assert table == "data   tokens\n-----  ------\na       1,000\nbooks       7"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with a checkpoint of the initial weights."""
    memory = MemoryConfig(groups=4, lifetime="batch")
    experiment = Experiment(
        model=tiny_model_config(vocab_size=RECALL.vocab_size, mixers=("swa", "swa")),
        data=RECALL,
        training=TrainingConfig(steps=1, batch_size=4, memory=memory),
        run_dir=str(tmp_path / "run"),
    )
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(experiment.to_json()))
    state = jax.jit(lambda: init_state(experiment.model, memory=memory, optimizer=None, seed=0))()
    with Checkpoints(directory / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(state, data_position=None, config=experiment.to_json())
    return directory


def eval_main(*arguments: str) -> int:
    return main(["eval", *arguments])


@pytest.mark.slow
def test_the_program_evaluates_a_run_directory(run_dir, capsys):
    assert eval_main(str(run_dir), "--recall.num-bins", "3", "--limit", "1") == 0
    record = json.loads((run_dir / "results" / "recall.json").read_text())
    assert record["provenance"]["checkpoint"]["step"] == 0
    assert len(record["provenance"]["checkpoint"]["fingerprint"]) == 64
    assert record["provenance"]["resets"] == {"memory": "batch", "groups": 4}
    assert record["provenance"]["scored_tokens"] == 4 * 2  # One batch of two questions each.
    assert "chance 0.250" in capsys.readouterr().out
    assert (run_dir / "results" / "recall.png").is_file()


@pytest.mark.thorough("arguments0-nearest name is recall")
@pytest.mark.slow_cases("arguments2-no checkpoint of step 7", "arguments3-num_bins=0")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "recal"], "nearest name is recall"),
        (["--suite", "ppl"], "ppl evaluates runs on text"),
        (["--step", "7"], "no checkpoint of step 7"),
        (["--recall.num-bins", "0"], "num_bins=0"),
        (
            ["--recal.num_bins", "3"],
            "Perhaps you meant: --recall.num_bins INT",
        ),
    ],
)
def test_the_program_says_what_is_wrong_and_exits_with_2(run_dir, capsys, arguments, message):
    assert eval_main(str(run_dir), *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_options_of_all_evaluations_reach_them(text, tmp_path, capsys):
    experiment = Experiment(model=tiny_model_config(), data=text, run_dir=str(tmp_path / "run"))
    model = LanguageModel(experiment.model, rngs=nnx.Rngs(0))
    memory = model.init_memory(jax.random.key(1), groups=1)
    start_run(experiment, Weights(nnx.split(model)[1], memory))
    other = tmp_path / "other.txt"
    other.write_text("Something else.")
    words = ("--suite", "ppl", "--fast_weight_dtype", "bfloat16", "--data", str(other))
    assert eval_main(str(tmp_path / "run"), *words) == 0
    provenance = json.loads((tmp_path / "run/results/ppl.json").read_text())["provenance"]
    assert list(provenance["data_files"]) == [str(other)]
    assert provenance["fast_weight_dtype"] == "bfloat16"
    assert eval_main(str(tmp_path / "run"), "--fast_weight_dtype", "float16") == 2


def test_there_are_no_more_than_80_options():
    def number(cls) -> int:
        hints = typing.get_type_hints(cls)
        parts = [hints[field.name] for field in dataclasses.fields(cls)]
        return sum(number(one) if dataclasses.is_dataclass(one) else 1 for one in parts)

    assert number(options_type()) <= 80


def test_options_of_every_evaluation_are_explained(capsys):
    assert eval_main("--help") == 0
    shown = capsys.readouterr().out
    for name, evaluation in EVALS.items():
        for field in dataclasses.fields(evaluation.config):
            assert f"--{name}.{field.name}" in shown


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppl", "needle", "recall"])
def test_an_evaluation_counts_all_of_its_work(name, subject, tmp_path, monkeypatch):
    """The work that was announced is the work that was done."""
    seen = {}

    class Counting(Forecast):
        def __init__(self, name, *, total, unit):
            super().__init__(name, total=total, unit=unit)
            self.done = 0
            seen[name] = self

        def add(self, amount):
            super().add(amount)
            self.done += amount

    for place in ("perplexity", "needle.needle", "recall"):
        monkeypatch.setattr(f"fwpkm_jax.evaluation.{place}.Forecast", Counting)
    configs = {}
    if name == "needle":
        configs["needle"] = EVALS["needle"].config(
            haystack_words=(10, 20), readings=(1, 2), samples=2, piece_length=16
        )
    if name == "recall":
        subject = dataclasses.replace(subject, data=RECALL)
    run_suite(subject, (name,), directory=tmp_path, configs=configs)
    assert seen[name].done == seen[name].total > 0
