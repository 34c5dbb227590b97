"""Every option of the programs behind docs/measurements/study.md, on made-up runs and texts."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.study import fast_weight_layers, study
from tests.benchmarks.programs import result, run

pytestmark = pytest.mark.thorough

CONFIG = Path(__file__).with_name("tiny_fast_weight_layer.py")


def test_the_ablation_of_fast_weight_layers(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("train", "valid"):
        books = ["".join(rng.choice(list("ab "), 101_000)) for _ in range(2)]
        lines = [json.dumps({"id": str(n), "text": text}) for n, text in enumerate(books)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    out = tmp_path / "layers.json"
    options = (
        *("--seeds", 0, "--steps", 1, "--documents", 3, "--layer-rate", 1e-3, "--bias-rate", 1e-2),
        *("--rates", 1e-3, "--learning-rates", 1e-2, "--chunk-length", 16, "--data", tmp_path),
        *("--config", CONFIG, "--out", out),
    )
    run("study.fast_weight_layers", *options)
    written = result(out)
    assert set(written["seeds"]["0"]) == set(fast_weight_layers.VARIANTS)
    assert written["mean"]["none"]["cost"] == 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_weight_layers, "of_seed", None)  # What the file holds is kept.
        run("study.fast_weight_layers", *options)
    assert result(out)["seeds"] == written["seeds"]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The study's folder, made up; commands that would train are noted in place of being run."""
    monkeypatch.setattr(study, "RUNS_DIR", tmp_path)
    monkeypatch.setattr(study, "EXCERPTS", tmp_path / "excerpts.jsonl")
    (tmp_path / "excerpts.jsonl").write_text("")
    noted = []
    monkeypatch.setattr(study.subprocess, "run", lambda command, check: noted.append(command))
    return noted


def test_the_study_trains_and_evaluates_what_is_not_done(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "load_run", lambda directory: SimpleNamespace(memory={"layer": 0}))
    monkeypatch.setattr(study, "subject_of", lambda run, name: name)
    evaluated = []

    def run_suite(subject, names, *, directory, configs):
        evaluated.append(directory.name)
        directory.mkdir(parents=True)
        (directory / f"{names[0]}.json").write_text("{}")

    monkeypatch.setattr(study, "run_suite", run_suite)
    monkeypatch.setattr(study, "tables", lambda: ["table"])
    for _ in range(2):
        assert run("study.study", "--runs", "gdn_swa__fwmlp:0", "--no-tables") == 0
    assert evaluated == ["ppl", "needle_1x", "needle_8x", "needle_frozen", "continual"]
    command = runs[0]
    assert command[1:5] == ["-m", "fwpkm_jax", "train", "study/gdn_swa__fwmlp"]
    assert command[command.index("--run_dir") + 1] == str(tmp_path / "gdn_swa__fwmlp_seed0")
    with pytest.raises(SystemExit, match="no such run"):
        run("study.study", "--runs", "gdn:7")


def test_the_tables_show_finished_runs(runs, tmp_path, capsys):
    losses = [[2.0] * len(study.DOMAINS)] * (len(study.DOMAINS) + 1)
    record = {"results": {"loss": losses, "adaptation": -1.0, "forgetting": 0.5, "unseen": 0.25}}
    folder = tmp_path / "gdn_swa_seed0" / "study" / "continual"
    folder.mkdir(parents=True)
    (folder / "continual.json").write_text(json.dumps(record))
    assert run("study.study", "--tables") == 0
    assert not runs
    changes = " | ".join(["0.000, 0.000"] * len(study.DOMAINS))
    row = f"| gdn_swa | 0 | {changes} | -1.0000 | 0.5000 | 0.2500 |"
    assert row in capsys.readouterr().out
