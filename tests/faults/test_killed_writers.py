"""Some kills of each kind of `tests/faults/kills.py`, which kills as many as one likes."""

import re
import subprocess
import sys

import pytest

from tests.training.processes import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("export", 2),
        ("import", 2),
        ("preparation", 6),
        ("saving of memories", 2),
        ("training, resumed on other devices", 2),
    ],
)
def test_a_killed_writer_loses_nothing(fault, kind, count):
    with fault(f"`kill -9` during {kind}", count):
        program = [sys.executable, "-W", "ignore", "-m", "tests.faults.kills"]
        done = subprocess.run(
            [*program, "--count", str(count), "--only", kind],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(rf"\| {count} \| {count} \| 0 \|$", done.stdout.strip())
