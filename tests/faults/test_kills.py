"""A run that is killed many times gives the same results as an uninterrupted run."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from fwpkm_jax.run import load_run
from tests.training.conftest import read_records
from tests.training.processes import finish, start

STEPS = 250
SECONDS = 900
# How long a process may take to notice that another one is gone.
GRACE = 150


@pytest.fixture
def train(compiled_once, tmp_path):
    """Starts `train.py` on the tiny config; what is still running at the end is killed."""
    running = []

    def begin(run: Path, count: int, every: int = STEPS):
        processes = start(
            run,
            f"--training.steps={STEPS}",
            f"--mesh.data={count}",
            f"--checkpoint.every={every}",
            count=count,
            environment={
                "JAX_COMPILATION_CACHE_DIR": compiled_once,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            },
        )
        running.extend(processes)
        return processes

    yield begin
    for process in running:
        process.kill()


def wait_until(reached, processes):
    """Returns once `reached()` is true; the processes must live until then."""
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert all(process.poll() is None for process in processes), finish(processes)
        assert time.monotonic() < deadline
        time.sleep(0.003)


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def saved(run: Path) -> list[str]:
    """Names of what is in the checkpoint directory."""
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def saving(run: Path) -> set[str]:
    """Names of the checkpoints that are being written."""
    return {name for name in saved(run) if not name.isdecimal()}


def wait_for_moment(kind, run, processes, rng, *, startup):
    """Returns at a random moment of a kind."""
    if kind == "starting":
        time.sleep(rng.uniform(0, startup))
        return
    log = run / "metrics.jsonl"
    resumed = size(log)
    wait_until(lambda: abs(size(log) - resumed) > 100, processes)
    if kind == "training":
        enough = size(log) + 400 * rng.randrange(1, 12)
        wait_until(lambda: size(log) > enough, processes)
        time.sleep(rng.uniform(0, 0.01))
    else:
        for _ in range(rng.randrange(1, 4)):
            before = saving(run)
            wait_until(lambda before=before: saving(run) - before, processes)
        time.sleep(rng.uniform(0, 0.03))


def final(run: Path):
    """What a run ends with: weights, and checksums of them and of the optimiser's state."""
    loaded = load_run(run)
    position = json.loads(
        (run / "checkpoints" / str(loaded.step) / "position" / "metadata").read_text()
    )
    return loaded.step, position["checksums"], jax.device_get((loaded.params, loaded.memory))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kills"), [(1, 10), (2, 30)])
def test_a_run_that_is_killed_ends_as_the_unbroken_one(fault, train, tmp_path, count, kills):
    rng = random.Random(count)
    whole, run = tmp_path / "whole", tmp_path / "run"
    began = time.monotonic()
    processes = train(whole, count=count)
    wait_until(lambda: size(whole / "metrics.jsonl") > 0, processes)
    startup = time.monotonic() - began
    assert [code for code, *_ in finish(processes, seconds=SECONDS)] == [0] * count

    moments = [("starting", "training", "saving")[index % 3] for index in range(kills)]
    rng.shuffle(moments)
    slowest, stuck = 0.0, 0
    for kind in moments:
        processes = train(run, count=count, every=5)
        wait_for_moment(kind, run, processes, rng, startup=startup)
        victims = rng.choice([processes, *([process] for process in processes)])
        alive = all(process.poll() is None for process in processes)
        for process in victims:
            process.send_signal(signal.SIGKILL)
        # A process that lost another ends by itself, or whoever started it ends it.
        began = time.monotonic()
        for process in processes:
            try:
                process.wait(max(0, GRACE - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                stuck += 1
                process.kill()
        slowest = max(slowest, time.monotonic() - began)
        ended = finish(processes)
        assert alive, ended
        # An old checkpoint may be half removed; those that the run goes on from are whole.
        skipped = [errors for _, _, errors in ended if "Skipping a damaged checkpoint" in errors]
        assert not skipped, skipped
        assert all(code != 0 for code, *_ in ended), ended
        print(f"{kind}: {len(victims)} of {count} killed", *saved(run), flush=True)
    print(f"others ended within {slowest:.0f} s, {stuck} had to be ended")
    with fault(f"kill -9, {count} process(es)", kills):
        ended = finish(train(run, count=count), seconds=SECONDS)
        assert [code for code, *_ in ended] == [0] * count, ended
        (step, sums, weights), (whole_step, whole_sums, whole_weights) = final(run), final(whole)
        assert step == whole_step == STEPS
        assert sums == whole_sums
        jax.tree.map(np.testing.assert_array_equal, weights, whole_weights)
        assert read_records(run) == read_records(whole)
