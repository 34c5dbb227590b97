"""`train.py` as a program: killed, stopped by signals, called with wrong arguments."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from fwpkm_jax.run.train import train
from fwpkm_jax.training.checkpoints.restore import checkpoint_steps
from tests.training.conftest import read_records

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("tiny_config.py")


@pytest.fixture
def start_program(compiled_once):
    """Starts `train.py` on the tiny config; what is still running at the end is killed."""
    running = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "train.py", str(CONFIG), *map(str, arguments)],
            cwd=ROOT,
            env={
                **os.environ,
                "JAX_COMPILATION_CACHE_DIR": compiled_once,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
                "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def wait_for_step(run, step, process, seconds=120):
    """Returns once `metrics.jsonl` holds a record of `step`."""
    deadline = time.monotonic() + seconds
    path = run / "metrics.jsonl"
    while not (path.is_file() and f'{{"step": {step},' in path.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} not reached in {seconds} s"
        time.sleep(0.002)


@pytest.mark.slow
def test_killed_runs_end_as_the_unbroken_one(unbroken, start_program, tmp_path):
    """Kills the run twice, once probably during a save, then lets it finish."""
    run = tmp_path / "run"
    # A checkpoint at every step: whenever the kill comes, one is being written.
    arguments = ("--run_dir", run, "--checkpoint.every", 1)
    for step in (4, 11):
        process = start_program(*arguments)
        wait_for_step(run, step, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        done = max(checkpoint_steps(run / "checkpoints"), default=0)
        # One checkpoint may be under way, begun before the records of the step after it.
        assert done >= step - 2
    experiment = dataclasses.replace(unbroken.experiment, run_dir=str(run))
    result = train(experiment, stream=io.StringIO())
    for a, e in zip(
        jax.tree.leaves(result.state[1:4]), jax.tree.leaves(unbroken.result.state[1:4]), strict=True
    ):
        np.testing.assert_array_equal(a, e)
    assert read_records(run) == read_records(unbroken.directory)


@pytest.mark.slow
def test_a_preempted_run_saves_within_30_seconds_and_goes_on_bit_for_bit(
    unbroken, start_program, tmp_path
):
    """A preempted machine gets SIGTERM, and is gone 30 seconds later."""
    run = tmp_path / "run"
    # Nothing is saved but for the signal, and the rate does not depend on the number of steps.
    options = ("--checkpoint.every", 1_000_000, "--optimizer.decay_steps", 20)
    process = start_program("--run_dir", run, "--training.steps", 1_000_000, *options)
    wait_for_step(run, 3, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, errors
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert f"SIGTERM: saved {run} at step {last} and stopped." in output
    assert checkpoint_steps(run / "checkpoints") == [last]
    assert "Traceback" not in errors
    base = unbroken.experiment
    ends = dataclasses.replace(
        base,
        training=dataclasses.replace(base.training, steps=last + 5),
        optimizer=dataclasses.replace(base.optimizer, decay_steps=20),
    )
    runs = run, tmp_path / "whole"
    continued, whole = (
        train(dataclasses.replace(ends, run_dir=str(where)), stream=io.StringIO()) for where in runs
    )
    assert (continued.step, whole.step) == (last + 5, last + 5)
    jax.tree.map(np.testing.assert_array_equal, continued.state[1:4], whole.state[1:4])
    assert read_records(runs[0]) == read_records(runs[1])


@pytest.mark.slow
def test_a_typo_ends_with_code_2_and_the_nearest_name(start_program):
    process = start_program("--trainig.steps", 3)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--trainig.steps" in errors
    assert "--training.steps INT" in errors
    assert "Traceback" not in errors
