"""Disks that are full or cannot be written, as mounts of a namespace that ends with the test.

Nothing is pretended: root, too, cannot write to a full or read-only file system.
"""

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fwpkm_jax.run import load_run
from fwpkm_jax.run.train import train
from tests.training.conftest import read_records
from tests.training.processes import CONFIG, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    try:
        subprocess.run(["unshare", "-Urm", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"This system lets no one mount in a namespace of their own: {error}")


@pytest.fixture
def mounted(compiled_once, tmp_path):
    """Runs a script in which `$DISK` can be mounted and `train` trains in `$DISK/run`."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def script(text: str) -> str:
        # `||`, because the script ends where a command outside a condition fails.
        train = f'"{sys.executable}" train.py "{CONFIG}" --run_dir "$DISK/run" 2>&1'
        train += ' && echo "code 0" || echo "code $?"'
        done = subprocess.run(
            ["unshare", "-Urm", "bash", "-euc", f"train() {{ {train}; }}; {text}"],
            cwd=ROOT,
            env={
                **os.environ,
                "DISK": str(disk),
                "OUT": str(tmp_path),
                "PYTHONPATH": str(ROOT),
                "JAX_COMPILATION_CACHE_DIR": compiled_once,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return script


def assert_ends_as(unbroken, run: Path):
    loaded, state = load_run(run), unbroken.result.state
    jax.tree.map(np.testing.assert_array_equal, loaded.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, loaded.memory, state.memory)
    assert read_records(run) == read_records(unbroken.directory)


def train_half(unbroken, directory: Path) -> None:
    """Trains the unbroken run up to the middle, checkpoints at steps 5 and 10."""

    def stop(model, memory):
        raise KeyboardInterrupt

    training = dataclasses.replace(unbroken.experiment.training, validate_every=12)
    experiment = dataclasses.replace(unbroken.experiment, training=training, run_dir=str(directory))
    with pytest.raises(KeyboardInterrupt):
        train(experiment, validate=stop, stream=io.StringIO())


# From a disk on which nothing fits to one that the last checkpoint fills.
@pytest.mark.parametrize("kilobytes", [4, 16, 180, 480, 700, 900])
def test_a_run_goes_on_once_a_full_disk_has_room(fault, mounted, unbroken, tmp_path, kilobytes):
    with fault("a full disk"):
        output = mounted(
            f"mount -t tmpfs -o size={kilobytes}k none $DISK; train; echo; echo with room;"
            "mount -o remount,size=100m $DISK; train; cp -a $DISK/run $OUT/run"
        )
        full, _, room = output.partition("with room")
        line, code = full.strip().splitlines()[-2:]
        assert line.startswith("train.py: ")
        assert "No space left on device" in line
        assert f"{tmp_path / 'disk' / 'run'}" in line
        assert code == "code 1"
        assert "Traceback" not in full
        assert "code 0" in room, room
        assert_ends_as(unbroken, tmp_path / "run")


def test_a_run_goes_on_once_a_read_only_disk_can_be_written(fault, mounted, unbroken, tmp_path):
    train_half(unbroken, tmp_path / "half")
    with fault("a read-only directory", 2):
        output = mounted(
            "mount -t tmpfs none $DISK; mount -o remount,ro $DISK; train; echo halfway;"
            "mount -o remount,rw $DISK; cp -a $OUT/half $DISK/run; mount -o remount,ro $DISK;"
            "train; echo writable; mount -o remount,rw $DISK; train; cp -a $DISK/run $OUT/run"
        )
        new, _, rest = output.partition("halfway")
        half, _, writable = rest.partition("writable")
        # A new run has nothing to go on from: its directory is refused.
        for part, code in ((new, 2), (half, 1)):
            (line,) = [line for line in part.splitlines() if line.startswith("train.py: ")]
            assert "Read-only file system" in line
            assert str(tmp_path / "disk" / "run") in line
            assert ("newest checkpoint" in line) == (code == 1)
            assert f"code {code}" in part
        assert "code 0" in writable, writable
        assert_ends_as(unbroken, tmp_path / "run")


def test_a_report_of_a_read_only_run_is_one_line(fault, mounted, unbroken, tmp_path):
    with fault("a read-only directory, met by report and export"):
        said = '2>&1 && echo "code 0" || echo "code $?"'
        output = mounted(
            f"mount -t tmpfs none $DISK; cp -a {unbroken.directory} $DISK/run;"
            "mount -o remount,ro $DISK;"
            "for command in 'report $DISK/run' 'export $DISK/run $DISK/out' 'memories $DISK/run';"
            f'do echo; eval "{sys.executable} -m fwpkm_jax $command" {said}; done'
        )
        report, export, listed = output.strip().split("\n\n")
        assert report.splitlines()[0].startswith("fwpkm report: ")
        assert export.splitlines()[-2].startswith("fwpkm export: ")
        for part in (report, export):
            assert part.splitlines()[-2].endswith("Read-only file system")
            assert part.splitlines()[-1] == "code 1"
            assert "Traceback" not in part
        assert listed.splitlines()[-1] == "code 0"
