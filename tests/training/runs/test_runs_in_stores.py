"""Whole runs in buckets: trained, interrupted, continued, read and evaluated."""

import dataclasses
import io
import json
import re
import secrets
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from fwpkm_jax.cli import main
from fwpkm_jax.interchange import start_run
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.run import load_run
from fwpkm_jax.run.train import resume_experiment, train
from fwpkm_jax.storage import lock
from fwpkm_jax.storage.lock import Lock, RunInUseError
from fwpkm_jax.storage.stores import Store
from fwpkm_jax.training.state import init_state
from tests.training.processes import finish, start
from tests.training.runs.stores import KINDS, SERVED, a_store
from tests.training.tiny_config import get_config

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


def experiment_of(run_dir, steps=20):
    experiment = get_config()
    training = dataclasses.replace(experiment.training, steps=steps)
    optimizer = dataclasses.replace(experiment.optimizer, decay_steps=20)
    return dataclasses.replace(
        experiment, training=training, optimizer=optimizer, run_dir=str(run_dir)
    )


def assert_same(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.thorough("s3")
@pytest.mark.slow_cases("memory")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_and_continued_in_a_bucket_is_that_of_a_disk(
    kind, tmp_path, monkeypatch, capsys
):
    whole = train(experiment_of(tmp_path / "whole"), stream=io.StringIO())

    def stop(model, memory):
        signal.raise_signal(signal.SIGTERM)
        return {"loss": 1.0}

    with a_store(kind, monkeypatch) as address:
        stopping = dataclasses.replace(
            experiment_of(address),
            training=dataclasses.replace(experiment_of(address).training, validate_every=7),
        )
        first = train(stopping, validate=stop, stream=io.StringIO())
        assert (first.status, first.step) == ("interrupted", 7)
        names = Store(address).sizes()
        assert "lock" not in names
        assert "checkpoints/7.json" in names
        printed = io.StringIO()
        again = train(resume_experiment(address), stream=printed)
        assert f"Resuming {address} at step 7." in printed.getvalue()
        assert f"Results: {address}/results.json" in printed.getvalue()
        assert_same(again.state[1:4], whole.state[1:4])
        lines = Store(address).read("metrics.jsonl").splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 21))
        run = load_run(address)
        assert run.step == 20
        assert_same(run.params, whole.state.params)
        assert main(["eval", address, "--suite", "recall", "--limit", "1"]) == 0
        assert "results/recall.json" in Store(address).sizes()
        assert f"wrote {address}/results/report.html" in capsys.readouterr().out
        assert main(["export", address, str(tmp_path / "exported")]) == 0
        assert (tmp_path / "exported" / "config.json").exists()
        other = dataclasses.replace(experiment_of(address), seed=1)
        with pytest.raises(ValueError, match="holds a run with another configuration"):
            train(other, stream=io.StringIO())


@pytest.mark.slow
def test_the_pages_commands_run(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "howto" / "buckets.md").read_text()
    commands = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1].strip().splitlines()
    assert len(commands) == 6
    monkeypatch.chdir(tmp_path)
    small = "--training.steps 2 --training.batch_size 2 --training.memory.groups 2 --data.length 64"
    small += " --model.fast_weight.chunk_size 32 --data.num_facts 4"
    small += " --data.min_distance 16 --data.num_valid 4"
    with a_store("memory", monkeypatch):
        for number, command in enumerate(commands):
            arguments = command.replace("s3://BUCKET", "memory://bucket").split()[1:]
            assert main([*arguments, *(small.split() if number == 0 else [])]) == 0
        assert "results/report.html" in Store("memory://bucket/runs/mine").sizes()
        again = load_run("memory://bucket/runs/again")
        assert_same(again.params, load_run("memory://bucket/runs/mine").params)
    assert "memory://bucket/runs/mine has finished its 2 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_exports_and_imports_lie_in_buckets(tmp_path, monkeypatch, capsys):
    """From a run to a bucket and to a run in one: the same weights, and none half-written."""
    run, taken = tmp_path / "run", "memory://bucket/taken"
    experiment = experiment_of(run)
    init = init_state(experiment.model, memory=experiment.training.memory, optimizer=None, seed=3)
    start_run(experiment, Weights(init.params, init.memory))
    exported, imported = "memory://bucket/exported", "memory://bucket/runs/imported"
    with a_store("memory", monkeypatch):
        assert main(["export", str(run), exported]) == 0
        assert capsys.readouterr().out == f"wrote {exported}\n"
        names = Store(exported).sizes()
        assert {"config.json", "weights.safetensors"} <= set(names)
        assert main(["import", "weights", exported, imported]) == 0
        assert capsys.readouterr().out == f"wrote {imported}\n"
        assert "lock" not in Store(imported).sizes()
        assert_same(load_run(imported).params, init.params)
        assert_same(load_run(imported).memory, init.memory)

        # The last object of an upload makes it whole.
        uploaded = []

        def upload(self, file, name, whole=Store.upload):
            if len(uploaded) == len(names) - 1:
                raise OSError("The cable was pulled.")
            uploaded.append(name)
            whole(self, file, name)

        with monkeypatch.context() as patched:
            patched.setattr(Store, "upload", upload)
            assert main(["export", str(run), taken]) == 1
        assert set(Store(taken).sizes()) == set(uploaded) == set(names) - {"config.json"}
        for command, message in (
            (["import", "weights", taken, str(tmp_path / "new")], "holds no whole folder"),
            (["export", str(run), taken], f"{taken} exists; choose another name."),
            (["import", "weights", exported, imported], f"{imported} is not empty"),
            (["import", "hf", str(tmp_path), imported], f"{imported} is not empty"),
        ):
            capsys.readouterr()
            assert main(command) == 2
            assert message in capsys.readouterr().err
        before = Store(imported).sizes()
        assert load_run(imported).step == 0
        assert Store(imported).sizes() == before


def test_a_run_in_use_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(lock, "SILENCE", 2.0)
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with a_store("memory", monkeypatch) as address:
        held = Lock(Store(address))
        with pytest.raises(RunInUseError, match=f"{address} is in use by process"):
            train(experiment_of(address), stream=io.StringIO())
        held.release()
        assert Store(address).sizes() == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVED)
def test_two_processes_train_in_a_bucket_and_go_on_there_as_on_a_disk(kind, tmp_path, monkeypatch):
    """Each process has half of the weights and of the moments, in a folder of its own."""
    mesh = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.memory=columns", "--optimizer.decay_steps=6")

    def train_to(step, where):
        # Without a cache of programs: the first process alone would find its own there, and waits
        # 30 s for the second.
        arguments = (*mesh, "--checkpoint.every=3", f"--training.steps={step}")
        results = finish(start(where, *arguments, devices=2), seconds=600)
        assert [code for code, _, _ in results] == [0, 0], results
        return results[0][1]

    disk = tmp_path / "disk"
    train_to(6, disk)
    expected = (disk / "checkpoints" / "6" / "position" / "metadata").read_text()
    with a_store(kind, monkeypatch) as address:
        store = Store(address)
        train_to(3, address)
        marker = json.loads(store.read("checkpoints/3.json"))
        owners = {x.split("/")[1] for x in marker["files"] if x.startswith("params/ocdbt")}
        assert owners == {"ocdbt.process_0", "ocdbt.process_1"}
        # A killed session left its parts of step 4, and no marker: the checkpoint before counts.
        left = f"checkpoints/4-{secrets.token_hex(8)}"
        for name in marker["files"]:
            store.write(f"{left}/{name}", store.read(f"checkpoints/{marker['folder']}/{name}"))
        assert f"Resuming {address} at step 3." in train_to(6, address)
        names = store.sizes()
        assert not [name for name in names if name.startswith(left) or ".part-" in name]
        assert "lock" not in names
        folder = json.loads(store.read("checkpoints/6.json"))["folder"]
        actual = json.loads(store.read(f"checkpoints/{folder}/position/metadata"))
        assert actual["checksums"] == json.loads(expected)["checksums"]
        # One process reads every array, and compares it with its checksum.
        assert load_run(address).step == 6


def test_other_files_in_the_folder_are_left_alone(monkeypatch):
    with a_store("memory", monkeypatch) as address:
        Store(address).write("thesis.txt", b"years of work")
        with pytest.raises(ValueError, match=r"not empty and holds no run \(no config.json\)"):
            train(experiment_of(address), stream=io.StringIO())
        assert Store(address).sizes() == {"thesis.txt": 13}


def test_a_missing_run_is_named(monkeypatch):
    with a_store("memory", monkeypatch) as address:
        for read in (load_run, resume_experiment):
            with pytest.raises(FileNotFoundError, match=rf"{address}/config.json does not exist"):
                read(address)
