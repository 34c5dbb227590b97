"""Files of a checkpoint and of a run's directory, cut off and with flipped bits.

One of each kind for every file is in tests/training/test_checkpoint.py; here the places are many
and random, and a whole run has to go on from what is left.
"""

import dataclasses
import io
import random
import shutil
from functools import partial

import jax
import numpy as np
import pytest

from fwpkm_jax.run.train import train
from fwpkm_jax.training.checkpoints.restore import (
    DamagedCheckpointError,
    checkpoint_steps,
    read_checkpoint,
)
from fwpkm_jax.training.optimizer import make_optimizer
from fwpkm_jax.training.state import init_state
from tests.training.conftest import read_records

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("abandoned_reads")]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content cut off, or with a bit flipped, at a random place."""
    if rng.random() < 0.5 or not content:
        return content[: rng.randrange(len(content) + 1)]
    place = rng.randrange(len(content))
    return (
        content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
    )


def assert_same(actual, expected):
    for part in ("params", "opt_state", "memory"):
        jax.tree.map(np.testing.assert_array_equal, getattr(actual, part), getattr(expected, part))


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_gives_an_error_or_what_was_saved(fault, unbroken, tmp_path, seed):
    experiment = unbroken.experiment
    abstract = jax.eval_shape(
        partial(
            init_state, experiment.model, memory=experiment.training.memory,
            optimizer=make_optimizer(experiment.optimizer, steps=20), seed=0,
        )
    )  # fmt: skip
    rng = random.Random(seed)
    folder = shutil.copytree(unbroken.directory / "checkpoints" / "20", tmp_path / "c" / "20")
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        path.write_bytes(damaged(content, rng))
        with fault("a cut or flipped file of a checkpoint"):
            try:
                restored = read_checkpoint(folder.parent, 20, abstract)
            except DamagedCheckpointError as error:
                assert str(folder) in str(error)  # noqa: PT017  Some files are of no account.
            else:
                assert_same(restored.state, unbroken.result.state)
                assert restored.data_position == {"next_index": 20}
        path.write_bytes(content)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_goes_on_from_the_last_whole_checkpoint(fault, unbroken, tmp_path, seed, caplog):
    """Files of the two newest of three checkpoints are damaged, and of the log of the metrics."""
    rng = random.Random(seed)
    run = shutil.copytree(unbroken.directory, tmp_path / "run")
    (run / "results.json").unlink()
    for step in (15, 20):
        files = sorted(p for p in (run / "checkpoints" / str(step)).rglob("*") if p.is_file())
        for path in rng.sample(files, 3):
            path.write_bytes(damaged(path.read_bytes(), rng))
    log = run / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[: -rng.randrange(1, 500)])
    experiment = dataclasses.replace(unbroken.experiment, run_dir=str(run))
    with fault("damaged checkpoints and log of a run"):
        result = train(experiment, stream=io.StringIO())
        assert_same(result.state, unbroken.result.state)
        for step in (15, 20):  # Nothing is deleted, and what was set aside is named and replaced.
            assert step in checkpoint_steps(run / "checkpoints")
            if (run / "damaged_checkpoints" / str(step)).is_dir():
                assert f"checkpoints/{step}: " in caplog.text


@pytest.mark.parametrize("name", ["config.json", "environment.json", "results.json"])
def test_a_damaged_file_of_a_run_is_named(fault, unbroken, tmp_path, name):
    run = shutil.copytree(unbroken.directory, tmp_path / "run")
    experiment = dataclasses.replace(unbroken.experiment, run_dir=str(run))
    training = dataclasses.replace(experiment.training, steps=21)
    longer = dataclasses.replace(experiment, training=training)
    path = run / name
    content = path.read_bytes()
    for cut in (0, 1, len(content) // 2, len(content) - 2):
        path.write_bytes(content[:cut])
        asked = longer if name == "environment.json" else experiment
        with fault("a cut file of a run"), pytest.raises(ValueError, match="is damaged") as error:
            train(asked, stream=io.StringIO())
        assert str(path) in str(error.value)


def test_lines_of_the_log_that_are_no_records_are_left_out(fault, unbroken, tmp_path, caplog):
    run = shutil.copytree(unbroken.directory, tmp_path / "run")
    log = run / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[3] = b"\x00\xff" + lines[3][2:]
    lines[7] = lines[7][: len(lines[7]) // 2] + b"\n"
    log.write_bytes(b"".join(lines) + b'{"step": 21, "loss"')
    training = dataclasses.replace(unbroken.experiment.training, steps=21)
    experiment = dataclasses.replace(unbroken.experiment, training=training, run_dir=str(run))
    with fault("damaged lines of the log", 3):
        train(experiment, stream=io.StringIO())
        steps = [record["step"] for record in read_records(run)]
        assert steps == [step for step in range(1, 22) if step not in (4, 8)]
        for number in (4, 8, 21):
            assert f"line {number} of {log}" in caplog.text
