"""The program behind recall beside full attention, at the least sizes."""

import json

import jax
import pytest

from lab.comparison.mqar_decoder import Layout, layers_of
from lab.comparison.mqar_tasks import Task, documents
from lab.comparison.mqar_training import Limited, Training
from lab.study import beside_attention
from tests.benchmarks.programs import run


def test_the_table_has_what_a_kind_can_lack(tmp_path, capsys):
    shares = {"writing": 0.75, "frozen": 0.25}
    lines = [
        {"run": "fwpkm_attention:1", "whole": shares, "limited": shares, "gates": [0.5, 0.125]},
        {"run": "windows:0", "whole": shares, "gates": None},
    ]
    out = tmp_path / "lines.jsonl"
    out.write_text("\n".join(json.dumps(line | {"steps": 7}) for line in lines))
    run("lab.study.beside_attention", "--runs", "--out", out)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `windows` | 0 | 7 | 0.750 |  |  |  |  |  |",
        "| `fwpkm_attention` | 1 | 7 | 0.750 | 0.250 | 0.750 | 0.250 | 0.500 | 0.125 |",
    ]
    with pytest.raises(SystemExit, match="no KIND:SEED"):
        run("lab.study.beside_attention", "--runs", "attention", "--out", out)


def test_a_memory_of_own_values_does_not_look_ahead():
    layout = Layout(width=8, heads=2)
    lookaheads = {}
    for kind in ("fwpkm_attention", "fwpkm_own_attention"):
        layers, limited = beside_attention.KINDS[kind]
        assert limited is not None
        for names in (layers, limited.name):
            memory, _ = layers_of(names, layout)
            lookaheads[names] = memory.rule.lookahead
    assert lookaheads == {
        "fwpkm_16+attention": 1,
        "fwpkm_16+swa": 1,
        "fwpkm_16_own+attention": 0,
        "fwpkm_16_own+swa": 0,
    }


@pytest.mark.thorough
def test_limited_updates_are_those_of_the_other_memory_and_gates_are_means():
    layout = Layout(vocabulary=32, width=8, heads=2, chunk=4, window=2)
    made = documents(Task(pairs=2, length=16, vocabulary=32), 4, split="train", seed=0)
    block = type(made)(*(leaf[None] for leaf in made))
    found = {}
    for name, kind, limited in (
        ("whole", "attention", None),
        ("windows", "swa", None),
        ("always", "attention", Limited("fwpkm_8+swa", 1.0)),
    ):
        layers = f"fwpkm_8+{kind}"
        training = Training(layers, layout, batch_size=4, rows=2, length=16, limited=limited)
        state, frozen = training.start(0)
        larger = state._replace(params=jax.tree.map(lambda x: 20 * x, state.params))
        found[name] = training.train(larger, frozen, [block], rate=1e-3, seed=0)[1]
    assert found["always"] == pytest.approx(found["windows"], rel=1e-6)
    assert found["whole"] != pytest.approx(found["always"], rel=1e-5)
    training = Training("fwpkm_8+attention", layout, batch_size=4, rows=2, length=16)
    state, frozen = training.start(0)
    gates = training.gates(state.params, frozen, made)
    assert gates is not None
    assert all(0.3 < gate < 0.7 for gate in gates)


@pytest.mark.thorough
def test_a_run_is_read_with_its_memory_frozen_and_its_attention_limited(tmp_path):
    out = tmp_path / "lines.jsonl"
    options = (
        *("--rate", 1e-3, "--epochs", 1, "--validations", 1, "--window", 4, "--width", 8),
        *("--documents", 8, "--tested", 4, "--batch-size", 4, "--rows", 4, "--out", out),
    )
    names = ("attention:0", "fwpkm_attention_pswa:1")
    assert run("lab.study.beside_attention", "--runs", *names, *options) == 0
    alone, both = map(json.loads, out.read_text().splitlines())
    assert (alone["run"], both["run"]) == names
    assert alone["gates"] is None
    assert alone["whole"]["writing"] == alone["whole"]["frozen"]
    assert "limited" in alone
    assert all(0 < gate < 1 for gate in both["gates"])
    assert both["steps"] == 2
    assert list(tmp_path.iterdir()) == [out]
