"""The programs about saved memories, at tiny sizes."""

import numpy as np
import pytest

from benchmarks.study import lasting
from fwpkm_jax.data import RecallData
from fwpkm_jax.run import Run
from fwpkm_jax.training.state import init_state, model_graph
from tests.benchmarks.programs import result, run
from tests.training.tiny_config import get_config


def test_other_texts_state_other_facts_only():
    data = RecallData(length=64, num_facts=4, num_keys=16, num_values=8, min_distance=16)
    facts = lasting.Facts(data, people=3, seed=0)
    questions, asked = facts.questions()
    told = facts.told()
    for row in range(3):
        pairs = dict(zip(questions[row, asked], questions[row, asked + 1], strict=True))
        assert len(pairs) == 4
        at = np.flatnonzero(np.isin(told[row], list(pairs)))
        assert {told[row, i]: told[row, i + 1] for i in at} == pairs
        assert at.max() < told.shape[1] // 2
        filler, other, same = (facts.other(kind)[row] for kind in lasting.KINDS)
        assert filler.max() < data.first_key
        keys = other[(other >= data.first_key) & (other < data.first_value)]
        assert len(set(keys)) == 4
        assert not set(keys) & set(pairs)
        assert set(same[(same >= data.first_key) & (same < data.first_value)]) == set(pairs)


@pytest.mark.thorough
def test_the_curve_has_a_point_for_each_conversation(tmp_path, monkeypatch, capsys):
    experiment = get_config()
    state = init_state(experiment.model, memory=experiment.training.memory, optimizer=None, seed=0)
    made_up = Run(experiment, model_graph(experiment.model), state.params, state.memory, 0)
    monkeypatch.setattr(lasting, "load_run", lambda _: made_up)
    out = tmp_path / "lasting.json"
    options = ("--people", 2, "--conversations", 2, "--seed", 1, "--out", out)
    run("study.lasting", "--run", "runs/made_up", *options)
    rows = result(out)["rows"]
    assert [(row["text"], row["conversations"]) for row in rows] == [
        (kind, number) for kind in lasting.KINDS for number in (-1, 0, 1, 2)
    ]
    assert all(0 <= row["recall"] <= 1 for row in rows)
    assert all(row["kilobytes_per_person"] > 0 for row in rows)
    assert "| conversations since | before | 0 | 1 | 2 |" in capsys.readouterr().out


def test_a_fork_takes_less_than_the_slots_it_wrote(tmp_path):
    out = tmp_path / "saved.json"
    sizes = ("--subkeys", 24, "--width", 16, "--written", 5)
    run("speed.saved_memory", *sizes, "--out", out)
    whole, fork, written, again, loaded = [row["bytes"] for row in result(out)["rows"]]
    assert again == loaded
    assert abs(fork - again) < 100
    assert fork + 5 * 16 * 4 < written < whole - 500 * 16 * 4
