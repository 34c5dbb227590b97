"""Runs the command `fwpkm` as a user does, in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# These programs are small: compile quickly rather than well.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", QUICKLY)


@pytest.fixture(scope="session")
def fwpkm(tmp_path_factory):
    """`fwpkm(*arguments, devices=1)` runs the command and returns what it printed."""
    cache = str(tmp_path_factory.mktemp("compiled"))

    def run(*arguments, devices=1):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICKLY}",
            "PJRT_NPROC": "64",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        command = [sys.executable, "-m", "fwpkm_jax", *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def trained(fwpkm, tmp_path_factory):
    """The directory of a run of six steps that nothing interrupted."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    fwpkm("train", ROOT / "tiny.py", "--run_dir", directory)
    return directory


@pytest.fixture(scope="session")
def losses():
    """`losses(directory)`: the training losses that a run has logged, by step."""

    def read(directory):
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return {r["step"]: r["loss"] for r in records if "loss" in r}

    return read
