"""Compiled programs are kept on disk by the commands, and found again."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from fwpkm_jax.compile_cache import default_folder, enable_compile_cache
from tests.training import mesh_flags

ROOT = Path(__file__).parents[1]
OLD_RUN = ROOT / "tests" / "training" / "data" / "run_before_registries"
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """JAX without a cache, as a user has it; put back afterwards."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("FWPKM_JAX_CACHE")
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = enable_compile_cache()
    assert folder is not None
    assert folder.is_dir()
    assert folder.parent == tmp_path / "cache" / "fwpkm_jax" / "compiled"
    assert jax.config.values["jax_compilation_cache_dir"] == str(folder)
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 0
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "fwpkm_jax" / "compiled"


def test_another_folder_or_none_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FWPKM_JAX_CACHE", "OFF")
    assert enable_compile_cache() is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
    monkeypatch.setenv("FWPKM_JAX_CACHE", str(tmp_path / "mine"))
    folder = enable_compile_cache()
    assert folder is not None
    assert folder.parent == tmp_path / "mine"


def test_jaxs_own_setting_is_left_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FWPKM_JAX_CACHE", str(tmp_path / "mine"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3.0)
    assert enable_compile_cache() == tmp_path / "theirs"
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 3.0
    assert not (tmp_path / "mine").exists()


def test_a_folder_that_cannot_be_made_is_one_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FWPKM_JAX_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        assert enable_compile_cache() is None
    (record,) = caplog.records
    assert "Set FWPKM_JAX_CACHE to another folder, or to off." in record.getMessage()
    assert jax.config.values["jax_compilation_cache_dir"] is None


@pytest.mark.thorough("mesh0")
@pytest.mark.parametrize("mesh", [{}, {"data": 2}, {"data": 2, "fsdp": 2, "memory": "columns"}])
def test_a_run_compiles_nothing_when_it_is_first_resumed(tmp_path, mesh):
    cache, run = tmp_path / "cache", tmp_path / "run"
    devices = mesh.get("data", 1) * mesh.get("fsdp", 1)
    environment = {
        **{name: value for name, value in os.environ.items() if "CACHE" not in name},
        **mesh_flags.environment(devices),
        "FWPKM_JAX_CACHE": str(cache),
        "PYTHONPATH": str(ROOT),
    }
    steps = ["--training.steps=4", "--checkpoint.every=2", "--training.validate_every=2"]
    options = [f"--mesh.{name}={value}" for name, value in mesh.items()]
    begin = ["tests/training/tiny_config.py", "--run_dir", run, *steps, *options]
    kept = []
    for arguments in (begin, ["--resume", run]):
        subprocess.run(
            [sys.executable, "train.py", *arguments],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
        )
        kept.append({path.name for path in cache.rglob("*-cache")})
        if not kept[1:]:  # As if it had been killed before its last checkpoint.
            shutil.rmtree(run / "checkpoints" / "4")
            (run / "results.json").unlink()
    first, second = kept
    assert sum("jit_step" in name for name in first) == 1
    assert (run / "checkpoints" / "4").is_dir()
    assert second - first == set()


@pytest.mark.slow
def test_a_resumed_run_compiles_nothing_the_second_time(tmp_path):
    """Each program that a process compiles becomes a file; the second process makes none."""
    cache = tmp_path / "cache"
    environment = {
        **{name: value for name, value in os.environ.items() if "CACHE" not in name},
        "FWPKM_JAX_CACHE": str(cache),
        "PYTHONPATH": str(ROOT),
    }
    kept = []
    for name in ("first", "second"):
        shutil.copytree(OLD_RUN, tmp_path / name)
        subprocess.run(
            [sys.executable, "train.py", "--resume", tmp_path / name, "--training.steps", "8"],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
        )
        kept.append({path.name for path in cache.rglob("*-cache")})
    first, second = kept
    assert any("step" in name for name in first)
    assert second == first
