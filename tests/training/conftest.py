"""One uninterrupted run, with which tests of interrupted runs compare."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from fwpkm_jax.config import Experiment
from fwpkm_jax.run import setup as parts
from fwpkm_jax.run.train import TrainResult, train
from tests.training.tiny_config import get_config

# What the clock decides; everything else in a record is the same on every machine of a kind.
_TIMINGS = {"tokens_per_second"}


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Keeps compiled steps for the session: many tests train the same tiny model."""
    directory = str(tmp_path_factory.mktemp("compiled"))
    settings = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield directory
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session", autouse=True)
def traced_once():
    """Sessions of one experiment in this process share their compiled step, wherever they write."""
    steps: dict[Experiment, Any] = {}
    compile_step = parts.compile_step

    def compile_or_share(setup, state, batch):
        training = dataclasses.replace(setup.experiment.training, validate_every=None)
        key = dataclasses.replace(setup.experiment, training=training, run_dir="")
        if key not in steps:
            steps[key] = compile_step(setup, state, batch)
        return steps[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "compile_step", compile_or_share)
        yield


class FinishedRun(NamedTuple):
    """A run of 20 steps without interruption."""

    experiment: Experiment
    directory: Path
    result: TrainResult
    printed: str


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory, compiled_once, traced_once) -> FinishedRun:
    directory = tmp_path_factory.mktemp("unbroken") / "run"
    experiment = dataclasses.replace(get_config(), run_dir=str(directory))
    stream = io.StringIO()
    result = train(experiment, stream=stream)
    return FinishedRun(experiment, directory, result, stream.getvalue())


def read_records(directory: Path) -> list[dict[str, Any]]:
    """The records of `metrics.jsonl` without values that depend on time."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{n: v for n, v in record.items() if n not in _TIMINGS} for record in records]
