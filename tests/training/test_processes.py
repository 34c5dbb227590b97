"""Several processes on this machine train together as one process does."""

import signal
import time
from functools import partial

import jax
import numpy as np
import pytest

from fwpkm_jax.training.optimizer import make_optimizer
from fwpkm_jax.training.restore import checkpoint_steps, read_checkpoint
from fwpkm_jax.training.state import init_state
from tests.training.conftest import read_records
from tests.training.processes import finish, start


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
