"""Run directories that cannot be used, and how a run is continued: what the command says."""

import dataclasses
import io
import json
import os
import subprocess
import sys

import pytest

from fwpkm_jax.cli import main
from fwpkm_jax.run.train import resume_experiment, train
from fwpkm_jax.training.runs import run_directory
from tests.training.processes import CONFIG


def refused(capsys, *arguments):
    """The one line that the command prints when it refuses a run directory."""
    config = [] if "--resume" in arguments else [CONFIG]
    assert main(["train", *map(str, [*config, *arguments])]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
    assert "newest checkpoint" not in errors
    return errors


def test_a_file_is_no_run_directory(capsys, tmp_path):
    (tmp_path / "notes").write_text("mine")
    line = refused(capsys, "--run_dir", tmp_path / "notes")
    assert f"{tmp_path / 'notes'} is a file, not a directory; choose another --run_dir." in line
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_directory_below_a_file_cannot_be_made(capsys, tmp_path):
    (tmp_path / "notes").write_text("mine")
    line = refused(capsys, "--run_dir", tmp_path / "notes" / "run")
    assert f"{tmp_path / 'notes' / 'run'} cannot be made (Not a directory)" in line
    assert "choose a --run_dir that you may write to" in line


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_directory_that_the_system_refuses_cannot_be_made(capsys):
    line = refused(capsys, "--run_dir", "/proc/foo/run")
    assert "/proc/foo/run cannot be made (No such file or directory)" in line


def test_a_directory_that_cannot_be_written_to_is_refused(capsys, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    # Permissions mean nothing to root, as whom tests may run.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(run))
    assert f"{run} cannot be written to" in refused(capsys, "--run_dir", run)
    assert list(run.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["a rule that is gone", "a field that is gone", "no field"])
def test_a_run_of_another_version_is_refused_in_one_line(capsys, unbroken, tmp_path, change):
    run = tmp_path / "run"
    run.mkdir()
    sessions = {"sessions": [{"commit": "6fbd989"}]}
    (run / "environment.json").write_text(json.dumps(sessions))
    config = unbroken.experiment.to_json()
    if change == "a rule that is gone":
        config["model"]["fast_weight"]["rule"] = {"class": "ErasingRule", "strength": 0.5}
    elif change == "a field that is gone":
        config["optimizer"]["momentum"] = 0.0
    else:
        del config["training"]["remat"]
    (run / "config.json").write_text(json.dumps(config))
    for arguments in (["--run_dir", run], ["--resume", run]):
        line = refused(capsys, *arguments)
        assert str(run / "config.json") in line
        assert "another version of fwpkm_jax wrote this run (commit 6fbd989)" in line


@pytest.mark.thorough
def test_another_configuration_is_refused_with_the_runs_own_command(unbroken, tmp_path):
    sessions = json.loads((unbroken.directory / "environment.json").read_text())["sessions"]
    assert sessions[0]["command"] == sys.argv
    other = dataclasses.replace(unbroken.experiment, seed=5)
    with pytest.raises(ValueError, match="another configuration") as error:
        train(other, stream=io.StringIO())
    lines = str(error.value).splitlines()
    assert lines[1] == "  seed: 0 -> 5"
    assert lines[2].startswith("It was started with: ")
    assert all(word in lines[2] for word in sys.argv if word.isalnum())
    assert lines[3] == (
        f"Continue it as it was with --resume {unbroken.directory}, or choose another --run_dir."
    )
    assert not (unbroken.directory / "lock").exists()


@pytest.mark.slow
def test_a_run_is_resumed_with_its_own_configuration_wherever_it_lies(unbroken, tmp_path):
    run = tmp_path / "moved"
    first = dataclasses.replace(
        unbroken.experiment,
        run_dir=str(tmp_path / "run"),
        training=dataclasses.replace(unbroken.experiment.training, steps=5),
        optimizer=dataclasses.replace(unbroken.experiment.optimizer, decay_steps=20),
    )
    train(first, stream=io.StringIO())
    (tmp_path / "run").rename(run)
    experiment = resume_experiment(run)
    assert experiment == dataclasses.replace(first, run_dir=str(run))
    stream = io.StringIO()
    further = dataclasses.replace(experiment.training, steps=6)
    result = train(dataclasses.replace(experiment, training=further), stream=stream)
    assert "at step 5." in stream.getvalue()
    assert result.step == 6
    with pytest.raises(FileNotFoundError, match="holds no run"):
        resume_experiment(tmp_path / "run")


def test_the_commit_is_that_of_this_code_and_of_no_project_around_it(tmp_path, monkeypatch):
    module = tmp_path / "env" / "run_directory.py"
    module.parent.mkdir()
    module.write_text("1")

    def git(*arguments):
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "a project")
    monkeypatch.setattr(run_directory, "__file__", str(module))
    assert run_directory.git_commit() is None
    git("add", "env")
    git("commit", "-q", "-m", "this code")
    assert run_directory.git_commit() == git("rev-parse", "HEAD")
    module.write_text("2")
    assert run_directory.git_commit() == git("rev-parse", "HEAD") + "-dirty"
