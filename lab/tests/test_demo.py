"""The demo's figures, on few numbers."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.cli import demo_command
from fwpkm_jax.config import load_config
from fwpkm_jax.interchange.imported_run import start_run
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.interchange.weights_folder import open_run
from lab.study import demo
from tests.benchmarks.programs import run


def test_numbers_told_are_counted_and_others_are_not(capsys, monkeypatch):
    sizes = ("--sets", 1, "--told", 2, "--read", 100, 0, "--seed", 1, "--one_sentence")
    assert run("lab.study.demo", *sizes) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["bytes_read"] for line in lines] == [100, 0]
    assert all(line["asked"] == 6 and 1 <= line["right"] <= 6 for line in lines)
    facts = demo_command.FACTS
    swapped = dict(zip(facts, reversed(facts.values()), strict=True))
    monkeypatch.setattr(demo_command, "ask", lambda talk, name: swapped[name])
    shipped = open_run(demo_command.FOLDER)
    assert demo.right_answers(shipped, facts, [], told=1) == 0
    assert demo.right_answers(shipped, swapped, [], told=1) == 6


def test_the_shipped_folder_is_that_of_a_run_with_the_write_that_keeps(tmp_path):
    shipped = open_run(demo_command.FOLDER)
    model = shipped.experiment.model
    rule = load_config("demo").model.fast_weight.rule
    plain = replace(model, fast_weight=replace(model.fast_weight, rule=rule))
    experiment = replace(shipped.experiment, model=plain, run_dir=str(tmp_path / "run"))
    memory = jax.tree.map(jnp.asarray, shipped.memory)
    memory = {name: rule.convert_memory(one) for name, one in memory.items()}
    start_run(experiment, Weights(shipped.params, memory))
    (tmp_path / "new").mkdir()
    run("lab.study.demo", "--ship", tmp_path / "run", "--folder", tmp_path / "new")
    again = open_run(tmp_path / "new")
    assert again.experiment.model == model
    jax.tree.map(np.testing.assert_array_equal, again.params, shipped.params)
    jax.tree.map(np.testing.assert_array_equal, again.memory, shipped.memory)
