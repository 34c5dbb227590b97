"""Two thousand steps: memory, speed and fast weights stay what they were."""

import json
import os
import time
from typing import NamedTuple

import numpy as np
import pytest

from fwpkm_jax.run import load_run
from tests.training.processes import finish, start

STEPS = 2000
EVERY = 250


class Sample(NamedTuple):
    """Measurements of the running program."""

    step: int
    resident_mb: float
    cpu_seconds: float


def sample(process, log) -> Sample | None:
    """Measures a running process; None before its first step."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - 4000))
            last = file.read().splitlines()[-2]  # The last one may not be whole.
        with open(f"/proc/{process.pid}/statm") as file:
            pages = int(file.read().split()[1])
        with open(f"/proc/{process.pid}/stat") as file:
            ticks = sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    except (FileNotFoundError, IndexError, ProcessLookupError):
        return None
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return Sample(json.loads(last)["step"], megabytes, ticks / os.sysconf("SC_CLK_TCK"))


@pytest.mark.slow
def test_memory_speed_and_fast_weights_stay_what_they_were(fault, tmp_path, capsys):
    run = tmp_path / "run"
    (process,) = start(
        run, f"--training.steps={STEPS}", f"--training.validate_every={EVERY}",
        f"--checkpoint.every={EVERY}", "--checkpoint.keep=8", count=1,
    )  # fmt: skip
    samples = []
    while process.poll() is None:
        if (seen := sample(process, run / "metrics.jsonl")) is not None:
            samples.append(seen)
        time.sleep(0.05)
    ((code, _, errors),) = finish([process])
    assert code == 0, errors

    steps, resident, cpu = (np.asarray(x) for x in zip(*samples, strict=True))
    edges = np.interp([500, 1000, 1500, 1990], steps, cpu)
    milliseconds = 1000 * np.diff(edges) / np.diff([500, 1000, 1500, 1990])
    memory = [float(resident[(steps > a) & (steps <= a + 500)].max()) for a in (500, 1000, 1500)]
    saved = range(EVERY, STEPS + 1, EVERY)
    norms = [float(np.linalg.norm(load_run(run, step).memory["layer_1"].values)) for step in saved]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gates, coverage = (
        np.asarray([record[f"layer_1/{name}"] for record in records])
        for name in ("gate_mean", "coverage")
    )
    with capsys.disabled():
        print(
            f"\nCPU per step {milliseconds.round(2)} ms; resident {np.round(memory, 1)} MB, each of"
            f" steps 501-1000, 1001-1500, 1501-2000\nnorm of the value table {np.round(norms, 2)}, "
            f"every {EVERY} steps\ngate {gates.min():.3f} to {gates.max():.3f}, "
            f"coverage {coverage.min():.3f} to {coverage.max():.3f}"
        )
    with fault("2,000 steps: memory, speed, fast weights"):
        assert memory[-1] < 1.02 * memory[0]
        assert milliseconds[-1] < 1.25 * milliseconds[0]
        assert max(norms[4:]) < 2 * max(norms[:4])
        assert len(gates) == len(coverage) == STEPS
        assert np.all((gates > 0) & (gates < 1) & (coverage > 0) & (coverage <= 1))
