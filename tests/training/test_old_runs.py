"""Runs that were written before rules and mixers had registries are read, or refused clearly.

`data/run_before_registries` was made by commit 6fbd989 with tiny_config.py, 6 steps and
optimizer.decay_steps=12; `run_before_registries_numbers.json` holds what that commit's code then
computed from it, `trees_before_registries.json` its configurations and the names of their arrays.
"""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.cli import eval_command as eval_program
from fwpkm_jax.config import from_json, read_experiment
from fwpkm_jax.rules import Retention
from fwpkm_jax.run import load_run
from fwpkm_jax.run.train import train
from fwpkm_jax.training.state import init_state, named_leaves
from tests.training.conftest import read_records

DATA = Path(__file__).parent / "data"
NUMBERS = json.loads((DATA / "run_before_registries_numbers.json").read_text())
TREES = json.loads((DATA / "trees_before_registries.json").read_text())


@pytest.fixture
def old_run(tmp_path) -> Path:
    """A copy of the old run."""
    run = tmp_path / "run"
    shutil.copytree(DATA / "run_before_registries", run)
    return run


@pytest.mark.thorough
def test_an_old_checkpoint_gives_the_logits_that_it_gave():
    run = load_run(DATA / "run_before_registries")
    assert run.step == 6
    output = run.model(jnp.asarray(NUMBERS["tokens"], jnp.int32), run.memory)
    np.testing.assert_allclose(output.logits, NUMBERS["logits"], rtol=1e-5, atol=1e-6)
    norm = np.linalg.norm(output.memory["layer_1"].values)
    np.testing.assert_allclose(norm, NUMBERS["memory_norm"], rtol=1e-5)


@pytest.mark.thorough
def test_an_old_run_is_evaluated_with_the_numbers_that_it_had(old_run):
    assert eval_program.main([str(old_run), "--suite", "recall"]) == 0
    results = json.loads((old_run / "results" / "recall.json").read_text())["results"]
    for mode in ("writing", "frozen"):
        for which, expected in NUMBERS["recall"][mode].items():
            found = results[mode][which]
            assert found["answers"] == expected["answers"]
            assert found["accuracy"] == pytest.approx(expected["accuracy"])
            assert found["interval"] == pytest.approx(expected["interval"])


@pytest.mark.thorough
def test_an_old_run_goes_on_as_its_own_code_went_on(old_run):
    experiment = read_experiment(old_run)
    training = dataclasses.replace(experiment.training, steps=12)
    stream = io.StringIO()
    train(dataclasses.replace(experiment, training=training, run_dir=str(old_run)), stream=stream)
    assert "at step 6." in stream.getvalue()
    records = read_records(old_run)
    assert [record["step"] for record in records] == list(range(1, 13))
    for record, expected in zip(records[6:], NUMBERS["metrics_of_steps_7_to_12"], strict=True):
        assert record.keys() >= expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(record[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", TREES)
def test_the_arrays_of_every_mixer_and_rule_have_the_names_that_they_had(name):
    experiment = from_json(TREES[name]["config"])
    state = jax.eval_shape(
        lambda: init_state(
            experiment.model, memory=experiment.training.memory, optimizer=None, seed=0
        )
    )
    for item in ("params", "memory"):
        leaves = named_leaves(getattr(state, item))
        found = {name: f"{x.dtype.name}{list(x.shape)}" for name, x in leaves.items()}
        assert found == TREES[name][item]


def test_an_old_configuration_is_written_again_with_all_its_fields_but_removed_ones():
    def assert_within(old, new, path="config"):
        if isinstance(old, dict):
            removed = Retention.removed_fields if old.get("class") == "Retention" else {}
            for key, value in old.items():
                if key in removed:
                    assert value == removed[key]
                    continue
                assert key in new, f"{path}.{key}"
                assert_within(value, new[key], f"{path}.{key}")
        else:
            assert new == old, path

    for tree in TREES.values():
        # How the processes of that start found each other is no part of a run any more.
        stored = {name: x for name, x in tree["config"].items() if name != "distributed"}
        assert_within(stored, from_json(tree["config"]).to_json())


def test_a_run_that_cannot_be_read_is_refused_with_the_way_out(old_run):
    config = json.loads((old_run / "config.json").read_text())
    config["model"]["fast_weight"]["rule"] = {"class": "ErasingRule", "strength": 0.5}
    (old_run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"ErasingRule") as error:
        read_experiment(old_run)
    message = str(error.value)
    assert "\n" not in message
    assert str(old_run / "config.json") in message
    assert "commit 6fbd9896102ef87d3b09d0d481325bc4fef63995" in message
