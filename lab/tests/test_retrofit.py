"""The program behind the study of a memory in a frozen model, at the smallest sizes."""

import json

import pytest

from lab.study import retrofit
from tests.benchmarks.programs import run


def test_the_table_compares_with_the_backbone(tmp_path):
    base = {"run": "backbone:0", "trained": 5000, "perplexity": 4.0,
            "words_56_readings_1": [0.0, 0.0, 0.0712, 0.5]}  # fmt: skip
    new = {"run": "fwpkm:0", "trained": 1000, "perplexity": 4.02}
    new |= {"words_56_readings_1": [0.5, 0.4, 0.6, 4.0], "words_56_readings_4": [0.9, 0.8, 1.0, 5]}
    *_, first, second = retrofit.table([base, new]).splitlines()
    assert first == "| backbone:0 | 5,000 | 4.000 | +0.00% | 0.00 [0.00, 0.07] |  |"
    assert second == "| fwpkm:0 | 1,000 | 4.020 | +0.50% | 0.50 [0.40, 0.60] | 0.90 [0.80, 1.00] |"
    out = tmp_path / "lines.jsonl"
    out.write_text("\n".join(map(json.dumps, (base, new))))
    run("lab.study.retrofit", "--runs", "backbone:0", "fwpkm:0", "--out", out)  # All there is done.
    for wrong in ("gdn:0", "fwpkm", "fwpkm:a"):
        with pytest.raises(SystemExit, match="no KIND:SEED"):
            run("lab.study.retrofit", "--runs", wrong, "--out", out)


@pytest.mark.slow
def test_the_retrofit_trains_what_is_missing_and_adds_a_line_for_each_run(tmp_path, capsys):
    words = " ".join(["now", "and", "then"] * 800)
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": "0", "text": words}))
    out = tmp_path / "new" / "lines.jsonl"
    small = {
        "model.mixers": "swa swa swa", "model.model_dim": 16, "model.mlp_dim": 16,
        "model.attention.head_dim": 8, "training.batch_size": 2, "training.memory.groups": 2,
        "training.validation_batches": 0, "training.log_every": 1,
    }  # fmt: skip
    options = (
        *("--config", "study/gdn_swa", "--backbone-steps", 1, "--steps", 1, "--samples", 1),
        *("--extra", *(f"{name}={value}" for name, value in small.items())),
        *("--words", 8, "--text", 100, "--data", tmp_path),
        *("--runs-dir", tmp_path / "runs", "--out", out),
    )
    assert run("lab.study.retrofit", "--runs", "backbone:0", "fwpkm:0", *options) == 0
    assert run("lab.study.retrofit", "--runs", "fwpkm:0", "lora:1", *options) == 0
    backbone, fwpkm, lora = map(json.loads, out.read_text().splitlines())
    assert [line["run"] for line in (backbone, fwpkm, lora)] == ["backbone:0", "fwpkm:0", "lora:1"]
    assert backbone["trained"] == backbone["slow_weights"]
    for line in (fwpkm, lora):
        assert line["trained"] == line["slow_weights"] - backbone["slow_weights"]
    assert fwpkm["perplexity_frozen"] > 1
    readings = {name for name in fwpkm if name.startswith("words")}
    assert readings == {f"words_8_{kind}" for kind in ("readings_1", "readings_4", "frozen_1")}
    assert "words_8_readings_1" in backbone
    assert f"| backbone:0 | {backbone['trained']:,} |" in capsys.readouterr().out
