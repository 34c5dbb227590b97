"""The program behind recall beside full attention, at the least sizes."""

import json

import pytest

from benchmarks.study import beside_attention
from tests.benchmarks.programs import run


def test_the_table_has_what_a_kind_can_lack(tmp_path, capsys):
    shares = {"writing": 0.75, "frozen": 0.25, "answers": 8}
    gates = {"layer_1": {"answers": 0.5, "others": 0.125}}
    lines = [
        {"run": "attention_fwpkm:1", "whole": shares, "window": shares, "gates": gates},
        {"run": "windows:0", "whole": shares},
    ]
    out = tmp_path / "lines.jsonl"
    out.write_text("\n".join(map(json.dumps, lines)))
    run("study.beside_attention", "--runs", "--out", out)
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:] == [
        "| `windows` | 0 | 0.750 |  |  |  |  |  |",
        "| `attention_fwpkm` | 1 | 0.750 | 0.250 | 0.750 | 0.250 | 0.500 | 0.125 |",
    ]
    with pytest.raises(SystemExit, match="no KIND:SEED"):
        run("study.beside_attention", "--runs", "attention", "--out", out)


@pytest.mark.slow
def test_a_model_with_attention_is_read_with_its_window_and_without_its_memory(tmp_path):
    small = {
        "data.length": 48, "data.num_facts": 3, "data.min_distance": 16, "model.model_dim": 16,
        "model.window": 8, "model.mlp_dim": 16, "training.batch_size": 2,
        "training.memory.groups": 2, "training.log_every": 1, "model.attention.head_dim": 4,
        "model.fast_weight.chunk_size": 16,
    }  # fmt: skip
    out = tmp_path / "lines.jsonl"
    options = (
        *("--steps", 1, "--batches", 1, "--runs-dir", tmp_path / "runs", "--out", out),
        *("--extra", *(f"{name}={value}" for name, value in small.items())),
    )
    names = ("attention:0", "attention_fwpkm_pswa:0")
    assert run("study.beside_attention", "--runs", *names, *options) == 0
    alone, both = map(json.loads, out.read_text().splitlines())
    assert (alone["run"], both["run"]) == names
    assert "gates" not in alone
    assert 0 < both["gates"]["layer_1"]["answers"] < 1
    assert both["whole"]["answers"] == both["window"]["answers"] > 0
    config = beside_attention.load_run(tmp_path / "runs/attention_fwpkm_pswa_seed0").experiment
    assert config.training.window_probability == 0.9
    assert config.training.steps == both["steps"] == 1
