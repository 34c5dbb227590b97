"""A newcomer's clone has no reference vectors or models beside it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_tests_are_found_in_a_clone_that_stands_alone(tmp_path):
    for path in ROOT.iterdir():
        if path.name == "tests":
            shutil.copytree(path, tmp_path / "tests")
        elif not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr
    assert "test_hf.py::" in found.stdout
