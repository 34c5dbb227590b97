"""The program behind the study of text without needles, at the least sizes."""

import json

import numpy as np
import pytest

from lab.study import plain_text
from tests.benchmarks.programs import SMALL_RUN, result_lines, run, write_words


def test_sections_are_means_by_document_and_reading():
    loss = np.array([1, 2, 3, 10, 20, 30, 5, 50], np.float32)
    document = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    found = plain_text.sections(loss, document, (1, 3), half=np.array([3, 1]))
    assert found == [[1, 5], [2.5, None], [10, 50], [25, None]]


def test_the_tables_compare_models_of_the_same_rate_and_seed(tmp_path, capsys):
    def line(kind, seed, frozen, **more):
        about = {"kind": kind, "rate": 0.002, "seed": seed, "steps": 9, "ends": [4, 8]}
        ways = {"frozen": [[frozen, frozen + 0.2]] * 4, **more}
        return {**about, "characters": 8, "extra": [], "train_loss": 1.0, **ways}

    lines = [line("backbone", 0, 2.0), line("fwpkm", 0, 2.5, writing=[[1.9, 2.1]] * 4)]
    lines.append(line("fwpkm", 1, 9.0, writing=[[9.0, 9.0]] * 4))
    lines.append(line("backbone", 0, 1.5, extra=["model.a=b"]))
    lines.append(line("backbone", 0, 1.25, extra=["model.a=b", "model.c=d"]))
    out = tmp_path / "lines.jsonl"
    out.write_text("\n".join(map(json.dumps, lines)))
    run("lab.study.plain_text", "--kinds", "--out", out)
    printed = capsys.readouterr().out
    assert "| backbone | 9 | 0.002 | 0 | 1.000 | 2.100 |" in printed
    assert "| fwpkm, writing | 9 | 0.002 | 0 | 1.000 | 2.000 |" in printed
    assert "| written minus backbone | 9 | 0.002 | 0 | -0.1000 [-0.1000, -0.1000] |" in printed
    assert "minus backbone | 9 | 0.002 | 1" not in printed
    assert "| backbone model.a=b | 9 | 0.002 | 0 | 1.000 | 1.600 |" in printed
    lines.append(line("backbone", 1, 8.9))
    out.write_text("\n".join(map(json.dumps, lines)))
    run("lab.study.plain_text", "--kinds", "--out", out)
    assert "| written minus backbone | 9 | 0.002 | mean of 2 | -0.0500 [" in capsys.readouterr().out
    change = "backbone, with it minus without (model.a=b)"
    assert f"| {change} | 9 | 0.002 | 0 | -0.5000 [-0.5000, -0.5000] |" in printed
    change = "backbone, with it minus without (model.c=d, beside model.a=b)"
    assert f"| {change} | 9 | 0.002 | 0 | -0.2500 [-0.2500, -0.2500] |" in printed
    with pytest.raises(SystemExit, match="--kinds: lact"):
        run("lab.study.plain_text", "--kinds", "lact", "--out", out)


@pytest.mark.slow
def test_both_models_read_unseen_books_twice(tmp_path):
    write_words(tmp_path)
    out = tmp_path / "new" / "lines.jsonl"
    options = (
        *("--rates", 2e-3, "--seeds", 1, "--steps", 2, "--characters", 200, "--ends", 50, 200),
        *("--extra", *SMALL_RUN),
        *("--data", tmp_path, "--runs-dir", tmp_path / "runs", "--out", out),
    )
    assert run("lab.study.plain_text", "--kinds", "backbone", *options) == 0
    assert run("lab.study.plain_text", "--kinds", "backbone", "fwpkm", *options) == 0
    backbone, fwpkm = result_lines(out)
    assert (backbone["kind"], fwpkm["kind"]) == ("backbone", "fwpkm")
    assert backbone["extra"] == fwpkm["extra"] == list(SMALL_RUN)
    assert "writing" not in backbone
    assert np.shape(fwpkm["writing"]) == np.shape(backbone["frozen"]) == (4, 1)
    assert fwpkm["writing"] != fwpkm["frozen"]
    # Attention and recurrent layers start empty in each piece; without a memory little changes.
    assert backbone["frozen"][3][0] == pytest.approx(backbone["frozen"][1][0], abs=0.05)
    assert np.isfinite(fwpkm["train_loss"])
