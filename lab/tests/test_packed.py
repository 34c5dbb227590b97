"""The program behind the study of packed documents with and without resets, at the least sizes."""

import json

import numpy as np
import pytest

from lab.study import packed
from lab.study.lines import train_run
from tests.benchmarks.programs import SMALL_RUN, run, write_words


def test_every_document_but_a_rows_first_is_scored_and_put_into_a_row_of_its_own():
    ids = np.array([[1, 1, 2, 2, 2, 3], [1, 2, 2, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    tokens = np.arange(21).reshape(3, 7)
    weight = np.array([[1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    rows = packed.in_rows(tokens, ids, weight)
    assert rows.position.tolist() == [[0, 0, 1, 2, 0, 1], [0, 1, 0, 0, 0, 0], [0] * 6]
    alone = packed.each_alone(rows)
    assert alone.tokens.tolist() == [[2, 3, 4, 5], [5, 6, 0, 0], [8, 9, 10, 0]]
    assert alone.ids.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert alone.position.tolist() == [[1, 2, 0], [1, 0, 0], [1, 0, 0]]
    for places in (rows, alone):
        start, rest = packed.parts_of(places, start=2)
        labels = places.tokens[:, 1:]
        assert sorted(labels[start]) == [3, 6, 9]
        assert labels[rest].tolist() == [4]


def test_documents_are_passages_that_end_with_a_word_in_random_order(tmp_path):
    words = " ".join(f"word{i:04d}" for i in range(400))
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": words}))
    options = packed.Options(
        characters=(20, 60), documents=(40, 5), data=tmp_path, runs_dir=tmp_path / "runs"
    )
    packed.write_documents(options)
    written = {}
    for name in ("train", "valid"):
        lines = (tmp_path / "runs" / f"{name}.jsonl").read_text().splitlines()
        written[name] = [json.loads(line)["text"] for line in lines]
    assert [len(written[name]) for name in ("train", "valid")] == [40, 5]
    assert all(10 <= len(text) <= 60 and text in words for text in written["train"])
    assert all(len(word) == 8 for text in written["train"] for word in text.split())
    begins = [words.index(text) for text in written["train"]]
    assert len(set(begins)) == 40
    assert begins != sorted(begins)


def test_the_tables_compare_kinds_over_seeds(tmp_path, capsys):
    def line(kind, seed, loss):
        values = {f"{name}_{part}": loss for name in packed.READINGS for part in packed.PARTS}
        return {"run": f"{kind}:{seed}", **values}

    lines = [line("backbone_resets", seed, 1.0) for seed in range(2)]
    lines += [line("backbone_joined", 0, 1.1), line("backbone_joined", 1, 1.3)]
    out = tmp_path / "lines.jsonl"
    out.write_text("\n".join(map(json.dumps, lines)))
    run("lab.study.packed", "--runs", "backbone_resets:0", "backbone_joined:1", "--out", out)
    printed = capsys.readouterr().out
    assert "| backbone_resets | 2 | 2.718 |" in printed
    assert "| backbone_joined | 2 | 3.320 |" in printed
    assert "| backbone_joined minus backbone_resets | 2 | +0.200 [-1.071, +1.471] |" in printed
    with pytest.raises(SystemExit, match="no KIND:SEED"):
        run("lab.study.packed", "--runs", "backbone:0", "--out", out)


def test_an_extra_option_without_a_value_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--extra: 'length' is no NAME=VALUES"):
        train_run(tmp_path, ["recall"], seed=0, text=tmp_path, extra=["length"])


@pytest.mark.slow
def test_a_model_with_resets_reads_a_document_in_a_row_as_it_does_alone(tmp_path):
    write_words(tmp_path)
    out = tmp_path / "new" / "lines.jsonl"
    options = (
        *("--steps", 2, "--batch", 2, "--characters", 20, 60, "--documents", 60, 20, "--start", 8),
        *("--extra", *SMALL_RUN),
        *("--data", tmp_path, "--runs-dir", tmp_path / "runs", "--out", out),
    )
    assert run("lab.study.packed", "--runs", "backbone_resets:0", "document:0", *options) == 0
    assert run("lab.study.packed", "--runs", "document:0", "fwpkm_joined:0", *options) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [x["run"] for x in lines] == ["backbone_resets:0", "document:0", "fwpkm_joined:0"]
    for line in lines:
        held = [line[f"resets_{x}"] == pytest.approx(line[f"alone_{x}"], rel=1e-5)
                for x in packed.PARTS]  # fmt: skip
        assert all(held) == (not line["run"].startswith("fwpkm_joined"))
        assert line["joined_start"] != pytest.approx(line["alone_start"], rel=1e-5)
        assert 0 < line["start_bytes"] <= 7 * line["documents"]
