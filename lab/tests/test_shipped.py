"""The program that trains and evaluates shipped configs, on tiny models."""

import json

import pytest

from lab.study import shipped
from tests.benchmarks.programs import SMALL_RUN, result, run, write_words


def test_gates_are_shown_by_kind_seed_and_step():
    runs = ("recall_carried:0", "books_tiny:1", "books_tiny:0", "recall:0")
    gates = ({"1": 0.5}, {"1": 0.25, "50": 0.75}, {"50": 1.0}, {})
    lines = [{"run": run, "gates": found} for run, found in zip(runs, gates, strict=True)]
    known = [kind for kind in shipped.KINDS if kind in ("books_tiny", "recall_carried")]
    shown = {
        "books_tiny": ["| books_tiny:0 |  | 1.00 |", "| books_tiny:1 | 0.25 | 0.75 |"],
        "recall_carried": ["| recall_carried:0 | 0.50 |  |"],
    }
    head, _, *rows = shipped.gates_table(lines).splitlines()
    assert head == "| run | step 1 | step 50 |"
    assert rows == [row for kind in known for row in shown[kind]]


@pytest.mark.slow_cases("books_tiny")
@pytest.mark.parametrize("kind", ["books_tiny", "recall_without_memory"])
def test_a_run_is_trained_evaluated_and_shown(kind, tmp_path, capsys):
    write_words(tmp_path)
    out = tmp_path / "new" / "lines.jsonl"
    extra = [*SMALL_RUN, "training.steps=2"]
    if kind == "recall_without_memory":
        extra = ["training.steps=1", "training.batch_size=2", "training.memory.groups=2"]
    options = (
        *("--runs", f"{kind}:1", "--extra", *extra, "--data", tmp_path),
        *("--runs-dir", tmp_path / "runs", "--out", out),
    )
    assert run("lab.study.shipped", *options) == 0
    line = result(out)
    assert line["arguments"] == [*shipped.KINDS[kind], *extra]
    assert line["train_loss"] > 0
    assert line["environment"]["device"] == "cpu"
    (row,) = [row for row in capsys.readouterr().out.splitlines() if f"| {kind}:1 |" in row]
    if kind == "books_tiny":
        assert set(line["gates"]) == {"1"}
        assert set(line["ppl"]) == {"writing", "frozen", "difference"}
        assert f"| {line['ppl']['frozen']['perplexity']:.4f} |" in row
    else:
        assert line["gates"] == {}
        assert f"| {line['recall']['writing']['accuracy']:.3f} [" in row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "make_run", None)  # What the file holds is kept.
        assert run("lab.study.shipped", *options) == 0


def test_mean_gates_are_those_of_the_named_steps(tmp_path):
    lines = [{"step": step, "loss": 2.0, "layer_2/gate_mean": step / 1000} for step in (1, 2, 50)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert shipped.gates(tmp_path) == {"1": 0.001, "50": 0.05}
