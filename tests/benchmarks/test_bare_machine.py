"""The GPU suite where only jax, flax, optax, orbax, chex, numpy, pytest and jaxtyping are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_suite, processes
from tests.benchmarks.programs import result

BARE = Path(__file__).parent / "bare"
ENVIRONMENT = {"PYTHONPATH": f"{BARE}{os.pathsep}{processes.ROOT}"}
QUICK = ("determinism", "train_step", "decode", "rows", "gated_delta", "layer", "memory")


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_part_can_be_imported():
    parts = gpu_suite.parts(gpu_suite.Options(out=Path("out")))
    programs = ["benchmarks.gpu_suite", *(module for module, *_ in parts.values())]
    lines = [f"import {', '.join(programs)}", "import sys, sitecustomize"]
    lines += ["print(len(sitecustomize.ABSENT), sitecustomize.ABSENT & set(sys.modules))"]
    assert python("\n".join(lines)).split()[1:] == ["set()"]


@pytest.mark.parametrize("package", ["tyro", "beartype.door", "grain"])
def test_the_packages_are_absent_there(package):
    code = f"try:\n  import {package}\nexcept ModuleNotFoundError as error: print(error)"
    assert python(code).startswith("No module named")


@pytest.mark.slow
def test_the_whole_suite_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    command = ["benchmarks.gpu_suite", "--out", str(tmp_path), "--size", "tiny"]
    command += ["--seconds", "3000", "--part-seconds", "900"]
    assert gpu_suite.run_part(command, limit_s=3600) is None
    for name in QUICK:
        assert result(tmp_path / f"{name}.json")
    parity = result(tmp_path / "parity.json")
    assert parity["tests"] == parity["skipped"] > 100
