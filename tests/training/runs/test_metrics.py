"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, a trace of some steps."""

import dataclasses
import io
import json
import sys
import types

import pytest

from fwpkm_jax.cli import main
from fwpkm_jax.run.train import train
from fwpkm_jax.training.runs.profiler import WARM_UP
from tests.training.conftest import read_records
from tests.training.processes import CONFIG


class FakeWandb(types.ModuleType):
    """Records the calls that this package makes to wandb."""

    def __init__(self):
        super().__init__("wandb")
        self.started, self.logged, self.ended = [], [], []

    def init(self, **settings):
        self.started.append(settings)
        return self

    def log(self, values, *, step):
        self.logged.append((step, values))

    def finish(self, *, exit_code):
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def experiment_of(unbroken, directory, *, steps=10, **changes):
    training = dataclasses.replace(unbroken.experiment.training, steps=steps)
    optimizer = dataclasses.replace(unbroken.experiment.optimizer, decay_steps=20)
    changes = {"training": training, "optimizer": optimizer, "run_dir": str(directory), **changes}
    return dataclasses.replace(unbroken.experiment, **changes)


@pytest.mark.slow
def test_wandb_gets_the_metrics_of_every_log_every_steps(unbroken, tmp_path, wandb):
    experiment = experiment_of(unbroken, tmp_path / "run", steps=7, log=("wandb",))
    training = dataclasses.replace(experiment.training, log_every=3, validate_every=5)
    experiment = dataclasses.replace(experiment, training=training)
    train(experiment, stream=io.StringIO())
    (settings,) = wandb.started
    assert settings["project"] == "fwpkm_jax"
    assert settings["name"] == "run"
    assert settings["dir"] == experiment.run_dir
    assert settings["config"] == experiment.to_json()
    assert settings["resume"] == "allow"
    # Each third step, and those that were validated.
    assert [step for step, _ in wandb.logged] == [3, 5, 6, 7]
    records = {record["step"]: record for record in read_records(tmp_path / "run")}
    for step, values in wandb.logged:
        assert values["tokens_per_second"] > 0
        assert {"step": step, **values}.items() >= records[step].items()
    assert "valid/loss" in wandb.logged[1][1]
    assert wandb.ended == [0]
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.slow
def test_sessions_of_a_run_are_one_run_on_wandb(unbroken, tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    both = ("tensorboard", "wandb")
    train(experiment_of(unbroken, tmp_path / "run", steps=5, log=both), stream=io.StringIO())
    train(experiment_of(unbroken, tmp_path / "run", steps=6, log=both), stream=io.StringIO())
    train(experiment_of(unbroken, tmp_path / "other", steps=5, log=both), stream=io.StringIO())
    first, second, other = (settings["id"] for settings in wandb.started)
    assert first == second != other
    assert {settings["project"] for settings in wandb.started} == {"mine"}
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_a_run_that_fails_is_marked_on_wandb(unbroken, tmp_path, wandb):
    def fail(model, memory):
        raise RuntimeError("no validation")

    with pytest.raises(RuntimeError, match="no validation"):
        train(
            experiment_of(unbroken, tmp_path / "run", steps=5, log=("wandb",)),
            validate=fail,
            stream=io.StringIO(),
        )
    assert wandb.ended == [1]


@pytest.mark.thorough
def test_wandb_that_does_not_start_is_one_line(unbroken, tmp_path, wandb, monkeypatch):
    def init(**settings):
        raise RuntimeError("api_key not configured\n(no-tty)")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(ValueError, match=r"not start \(api_key not configured \(no-tty\)\).*login"):
        train(experiment_of(unbroken, tmp_path / "run", log=("wandb",)), stream=io.StringIO())


def test_wandb_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = ["train", str(CONFIG), "--run_dir", str(tmp_path / "run"), "--log", "wandb"]
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert "--log wandb needs the package wandb" in errors
    assert "pip install wandb" in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_profile_traces_steps_after_the_first_ones_and_changes_no_number(unbroken, tmp_path):
    stream = io.StringIO()
    experiment = experiment_of(unbroken, tmp_path / "run", profile=2)
    train(experiment, stream=stream)
    folder = tmp_path / "run" / "profile"
    assert list(folder.rglob("*.xplane.pb"))
    expected = f"Wrote a trace of steps {WARM_UP + 1} to {WARM_UP + 2} to {folder};"
    assert stream.getvalue().count(expected) == 1
    expected_records = read_records(unbroken.directory)[:10]
    for record, expected_record in zip(
        read_records(tmp_path / "run"), expected_records, strict=True
    ):
        assert record["loss"] == expected_record["loss"]


@pytest.mark.slow
def test_a_profile_longer_than_the_session_ends_with_it(unbroken, tmp_path):
    stream = io.StringIO()
    train(experiment_of(unbroken, tmp_path / "run", steps=5, profile=50), stream=stream)
    assert f"steps {WARM_UP + 1} to 5 to " in stream.getvalue()
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    stream = io.StringIO()
    train(experiment_of(unbroken, tmp_path / "short", steps=2, profile=1), stream=stream)
    assert "trace" not in stream.getvalue()
    assert not (tmp_path / "short" / "profile").exists()


@pytest.mark.thorough
def test_a_profile_of_no_steps_is_refused(unbroken):
    with pytest.raises(ValueError, match="profile=0 is too small; use 1 or more"):
        dataclasses.replace(unbroken.experiment, profile=0)


@pytest.mark.slow
def test_log_and_profile_are_recorded(unbroken, tmp_path, wandb):
    experiment = experiment_of(unbroken, tmp_path / "run", steps=5, log=("wandb",), profile=1)
    train(experiment, stream=io.StringIO())
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["log"], config["profile"]) == (["wandb"], 1)
    # Both may change when a run goes on.
    train(experiment_of(unbroken, tmp_path / "run", steps=6), stream=io.StringIO())
