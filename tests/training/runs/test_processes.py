"""Several processes on this machine train together as one process does."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import jax
import numpy as np
import pytest

from fwpkm_jax.run.train import resume_experiment
from fwpkm_jax.training.checkpoints.restore import checkpoint_steps, read_checkpoint
from fwpkm_jax.training.optimizer import make_optimizer
from fwpkm_jax.training.runs import processes as processes_module
from fwpkm_jax.training.runs.processes import LOST, DistributedConfig
from fwpkm_jax.training.state import init_state
from tests.training import mesh_flags
from tests.training.conftest import read_records
from tests.training.processes import ROOT, finish, start
from tests.training.tiny_config import get_config


@pytest.fixture
def cached(compiled_once):
    """Processes share what tests have compiled."""
    return {
        "JAX_COMPILATION_CACHE_DIR": compiled_once,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def wait_for_step(run, step, processes, seconds=200):
    """Returns once `metrics.jsonl` holds a record of `step`."""
    deadline = time.monotonic() + seconds
    path = run / "metrics.jsonl"
    while not (path.is_file() and f'{{"step": {step},' in path.read_text()):
        assert all(process.poll() is None for process in processes), finish(processes)
        assert time.monotonic() < deadline, f"step {step} not reached in {seconds} s"
        time.sleep(0.05)


@pytest.mark.thorough
def test_two_processes_train_as_one_and_stop_together_when_one_is_asked_to(
    unbroken, tmp_path, cached
):
    run = tmp_path / "run"
    arguments = ("--training.steps=100000", "--optimizer.decay_steps=20", "--mesh.data=2")
    processes = start(run, *arguments, "--checkpoint.every=100000", environment=cached)
    wait_for_step(run, 12, processes)
    processes[1].send_signal(signal.SIGTERM)
    (code, out, error), (other_code, other_out, _) = finish(processes)
    assert (code, other_code) == (143, 143), error
    # The first process alone speaks and writes.
    assert "SIGTERM: saved" in out
    assert "SIGTERM" not in other_out
    records = read_records(run)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    for mine, alone in zip(records[:12], read_records(unbroken.directory), strict=False):
        assert mine.keys() == alone.keys()
        for name, value in alone.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    # What both wrote, one process reads.
    (step,) = checkpoint_steps(run / "checkpoints")
    assert step == len(records)
    experiment = unbroken.experiment
    abstract = jax.eval_shape(
        partial(
            init_state,
            experiment.model,
            memory=experiment.training.memory,
            optimizer=make_optimizer(experiment.optimizer, steps=20),
            seed=0,
        )
    )
    restored = read_checkpoint(run / "checkpoints", step, abstract)
    assert int(restored.state.step) == step
    assert restored.data_position == {"next_index": step}


MESH = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.memory=columns", "--optimizer.decay_steps=6")


def run_to_its_end(run, *arguments, **options):
    results = finish(start(run, *arguments, **options))
    assert [code for code, _, _ in results] == [0] * len(results), results
    return [out for _, out, _ in results]


def checksums_of(run, step):
    """The checksum of every array of a checkpoint."""
    position = run / "checkpoints" / str(step) / "position" / "metadata"
    return json.loads(position.read_text())["checksums"]


@pytest.mark.slow
def test_two_and_four_processes_train_alike_and_as_one_with_as_many_devices(tmp_path, cached):
    def train(name, *arguments, **options):
        steps = ("--training.steps=6", "--training.validate_every=3", "--checkpoint.every=3")
        run_to_its_end(tmp_path / name, *MESH, *steps, *arguments, environment=cached, **options)

    train("one", count=1, devices=4)
    train("two", count=2, devices=2)
    train("four", count=4, devices=1)
    train("changing", "--training.steps=3", count=2, devices=2)
    train("changing", count=4, devices=1)
    one, two = (read_records(tmp_path / name) for name in ("one", "two"))
    assert len(one) == 6
    for mine, alone in zip(two, one, strict=True):
        assert mine.keys() == alone.keys()
        for name, value in alone.items():  # Four numbers are added up in another order.
            np.testing.assert_allclose(mine[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    # Of many processes any number gives the same, and so does a run that two began and four ended.
    for name in ("four", "changing"):
        assert read_records(tmp_path / name) == two
        assert checksums_of(tmp_path / name, 6) == checksums_of(tmp_path / "two", 6)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_one_and_on_another_mesh(tmp_path, cached):
    run, alone = tmp_path / "run", tmp_path / "alone"
    end = ("--training.steps=6", "--training.validate_every=3", "--checkpoint.every=3")
    run_to_its_end(run, *MESH, *end, count=2, devices=2, environment=cached)
    run_to_its_end(alone, *end, MESH[-1], count=1, devices=1, environment=cached)
    saved = checksums_of(run, 3)
    shutil.rmtree(run / "checkpoints" / "6")
    (run / "results.json").unlink()
    resumed = subprocess.run(
        [sys.executable, "train.py", "--resume", run, "--mesh.fsdp=1"],
        cwd=ROOT,
        env={**os.environ, **mesh_flags.environment(2), "PYTHONPATH": str(ROOT), **dict(cached)},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming" in resumed.stdout
    assert checksums_of(run, 3) == saved  # Read whole: a checkpoint that differs is set aside.
    assert not (run / "damaged_checkpoints").exists()
    for mine, one in zip(read_records(run), read_records(alone), strict=True):
        for name, value in one.items():  # Meshes add up in another order.
            np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


FAULTS = {
    "start": "ValueError: there is no data here",
    "step": "the disk is gone",
    "nan": "the batch's loss_weight is not finite",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_an_error_in_one_process_ends_all_and_the_run_goes_on_from_its_checkpoint(
    kind, tmp_path, cached
):
    run = tmp_path / "run"
    arguments = ("--mesh.data=2", "--training.steps=4", "--checkpoint.every=1")
    program = ("-m", "tests.training.process_faults", kind)
    began = time.monotonic()
    results = finish(start(run, *arguments, program=program, environment=cached))
    assert time.monotonic() - began < 200
    codes = [code for code, _, _ in results]
    assert 0 not in codes
    assert None not in codes
    message = FAULTS[kind]
    assert message.removeprefix("ValueError: ") in results[1][2]
    if kind == "start":
        assert f"Process 1 of the run failed: {message}" in results[0][2]
        assert not run.exists()
        return
    if kind == "nan":
        assert message in results[0][2]
    assert checkpoint_steps(run / "checkpoints")[-1] == 2
    run_to_its_end(run, *arguments, environment=cached)
    assert [record["step"] for record in read_records(run)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_checkpoint_that_one_process_finds_damaged_is_skipped_by_all(tmp_path, cached):
    run = tmp_path / "run"
    arguments = ("--mesh.data=2", "--checkpoint.every=2", "--optimizer.decay_steps=6")
    run_to_its_end(run, *arguments, "--training.steps=4", environment=cached)
    whole = shutil.copytree(run, tmp_path / "whole")
    # What the second process wrote of the memory of step 4.
    files = [p for p in (run / "checkpoints/4/memory/ocdbt.process_1").rglob("*") if p.is_file()]
    assert files
    for path in (run / "checkpoints" / "4" / "memory").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-8])
    for where in (run, whole):
        processes = start(where, *arguments, "--training.steps=6", environment=cached)
        (code, out, error), (other_code, _, _) = finish(processes)
        assert (code, other_code) == (0, 0), error
        assert f"at step {2 if where == run else 4}." in out
        assert (f"Skipping a damaged checkpoint: {where}/checkpoints/4" in error) == (where == run)
    assert (run / "damaged_checkpoints" / "4").is_dir()
    assert checkpoint_steps(run / "checkpoints") == [2, 4, 6]
    again, unbroken = read_records(run), read_records(whole)
    unbroken[3].pop("valid/loss")  # Step 4 was the last of one session.
    unbroken[3].pop("valid/answer_accuracy")
    assert again == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_lost_another_ends_in_one_line_and_one_resumes(tmp_path, cached, victim):
    """Two processes, one killed; then one process alone goes on, on another mesh."""
    run = tmp_path / "run"
    arguments = ("--training.steps=100000", "--optimizer.decay_steps=20", "--checkpoint.every=3")
    processes = start(run, "--mesh.data=2", *arguments, environment=cached)
    wait_for_step(run, 8, processes)
    processes[victim].kill()
    code, _, errors = finish(processes)[1 - victim]
    assert code == 1, errors
    assert errors.splitlines()[-1].startswith("train.py: ")
    assert errors.splitlines()[-1].endswith(LOST)
    assert "distributed" not in json.loads((run / "config.json").read_text())
    step = checkpoint_steps(run / "checkpoints")[-1]
    resume = f"train.py --resume {run} --training.steps {step + 2} --mesh.data 2 --mesh.fsdp 2"
    process = subprocess.Popen(
        [sys.executable, *resume.split()],
        cwd=ROOT,
        env={**os.environ, **mesh_flags.environment(4), **cached, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ((code, out, errors),) = finish([process])
    assert code == 0, errors
    assert f"at step {step}." in out
    assert [record["step"] for record in read_records(run)] == list(range(1, step + 3))


@pytest.mark.slow
def test_a_process_that_waits_says_for_whom_and_where(tmp_path):
    processes = start(tmp_path / "run", count=2)
    processes[1].kill()  # Before it has connected.
    line = processes[0].stdout.readline()
    processes[0].kill()
    finish(processes)  # Closes their pipes.
    assert re.match(r"Process 0 of 2 waits for process 1 at localhost:\d+, for 1\d s now; ", line)
    assert not (tmp_path / "run").exists()
    config = DistributedConfig(coordinator="host:7", num_processes=4, process_id=2)
    assert processes_module._whom(config) == "Process 2 of 4 waits for process 0 at host:7"
    config = dataclasses.replace(config, process_id=0)
    assert processes_module._whom(config) == ("Process 0 of 4 waits for processes 1 to 3 at host:7")


def test_a_run_stores_no_processes(tmp_path):
    experiment = get_config()
    config = DistributedConfig(coordinator="localhost:8476", num_processes=2, process_id=0)
    several = dataclasses.replace(experiment, distributed=config, run_dir=str(tmp_path))
    assert "distributed" not in several.to_json()
    assert several.fingerprint == experiment.fingerprint
    (tmp_path / "config.json").write_text(json.dumps(several.to_json()))
    assert resume_experiment(tmp_path).distributed == DistributedConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"detect": True, "process_id": 1}, "detect=True asks the cluster"),
        ({"coordinator": "localhost:1", "process_id": 0}, "num_processes=None .* give all three"),
        ({"coordinator": "localhost", "num_processes": 1, "process_id": 0}, "must be HOST:PORT"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            "process_id=2 must be",
        ),
        (
            {"coordinator": "a:1", "num_processes": 0, "process_id": 0},
            "num_processes=0 is too small",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**fields)


@pytest.mark.slow
def test_without_a_cluster_there_is_nothing_to_detect(tmp_path):
    ((code, _, error),) = finish(start(tmp_path / "run", "--distributed.detect=True", count=1))
    assert code == 2
    assert "train.py: distributed.detect found no cluster" in error
    assert not (tmp_path / "run").exists()
