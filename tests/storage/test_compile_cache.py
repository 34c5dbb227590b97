"""Compiled programs are kept on disk or in a bucket by the commands, and found again."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from fwpkm_jax.cli import main
from fwpkm_jax.storage.addresses import StoreError
from fwpkm_jax.storage.compile_cache import default_folder, use_compile_cache
from fwpkm_jax.storage.stores import Store
from tests.training import mesh_flags
from tests.training.runs.stores import KINDS, a_store

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
    "jax_compilation_cache_max_size",
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
    compilation_cache.reset_cache()


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = use_compile_cache()
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
    assert use_compile_cache() is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
    monkeypatch.setenv("FWPKM_JAX_CACHE", str(tmp_path / "mine"))
    folder = use_compile_cache()
    assert folder is not None
    assert folder.parent == tmp_path / "mine"


def test_jaxs_own_setting_is_left_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FWPKM_JAX_CACHE", str(tmp_path / "mine"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3.0)
    assert use_compile_cache() == tmp_path / "theirs"
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 3.0
    assert not (tmp_path / "mine").exists()


def test_a_folder_that_cannot_be_made_is_one_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FWPKM_JAX_CACHE", str(tmp_path / "file" / "cache"))
    use_compile_cache()
    with caplog.at_level(logging.WARNING):
        for number in (4, 5):
            compile_one(number)
    (record,) = caplog.records
    assert "file/cache" in record.getMessage()
    assert "Set FWPKM_JAX_CACHE to another folder, or to off." in record.getMessage()


@pytest.fixture
def machine():
    """Makes this process that of a new machine: without settings, and no program in memory."""

    def start():
        jax.config.update("jax_compilation_cache_dir", None)
        jax.clear_caches()

    return start


def compile_one(number=1):
    """A program for each number."""

    def small_program(x):
        return x * number + 1

    return jax.jit(small_program)(jnp.arange(3 + number)).tolist()


def programs(address):
    return [name for name in Store(address).sizes() if "jit_small_program" in name]


def _counted(calls, name):
    original = getattr(compilation_cache, name)

    def call(*arguments):
        calls.append(arguments[0])
        return original(*arguments)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_programs_in_a_bucket_are_found_by_another_machine(kind, machine, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        compilation_cache, "put_executable_and_time", _counted(compiled, "put_executable_and_time")
    )
    with a_store(kind, monkeypatch) as address:
        monkeypatch.setenv("FWPKM_JAX_CACHE", f"{address}/")
        kept = []
        for name in ("first", "second"):
            machine()
            compiled.clear()
            use_compile_cache()
            assert compile_one() == [1, 2, 3, 4]
            assert bool(compiled) == (name == "first")
            kept.append(Store(address).sizes())
        assert kept[0] == kept[1]
        (name,) = programs(address)
        assert name.startswith(f"{os.uname().machine}-")


@pytest.mark.slow_cases("cut-disk")
@pytest.mark.thorough
@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize("damage", ["cut", "empty", "zeros", "bit", "garbage that unpacks"])
def test_a_damaged_program_is_named_in_one_line_and_replaced(
    where, damage, machine, monkeypatch, tmp_path, caplog
):
    compiled = []
    monkeypatch.setattr(
        compilation_cache, "put_executable_and_time", _counted(compiled, "put_executable_and_time")
    )
    with a_store("memory", monkeypatch) as address:
        store = Store(address)
        monkeypatch.setenv("FWPKM_JAX_CACHE", address if where == "memory" else str(tmp_path / "c"))

        def session():
            machine()
            compiled.clear()
            caplog.clear()
            use_compile_cache()
            with caplog.at_level(logging.WARNING):
                assert compile_one() == [1, 2, 3, 4]
            said = [x.getMessage() for x in caplog.records if "damaged" in x.getMessage()]
            return any("small_program" in x for x in compiled), len(said)

        assert session() == (True, 0)
        assert session() == (False, 0)
        if where == "memory":
            (name,) = programs(address)
            content = store.read(name)
        else:
            (file,) = (tmp_path / "c").rglob("jit_small_program*-cache")
            content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        damaged = {
            "cut": content[: len(content) // 2],
            "empty": b"",
            "zeros": bytes(len(content)),
            "bit": bytes(flipped),
            "garbage that unpacks": compilation_cache.compress_executable(b"\0\0\0\1junk"),
        }[damage]
        if where == "memory":
            store.write(name, damaged)
        else:
            file.write_bytes(damaged)
        assert session() == (True, 1)
        assert session() == (False, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(("lost", "what"), [("read", "read"), ("write", "written")])
def test_a_bucket_that_cannot_be_read_or_written_costs_one_warning(
    lost, what, machine, monkeypatch, caplog
):
    with a_store("memory", monkeypatch) as address:
        monkeypatch.setenv("FWPKM_JAX_CACHE", address)

        def fail(self, *_, **__):
            raise StoreError(f"{self} is away.")

        monkeypatch.setattr(Store, lost, fail)
        machine()
        use_compile_cache()
        with caplog.at_level(logging.WARNING):
            for number in (2, 3):
                compile_one(number)
        (record,) = caplog.records
        assert f"cannot be {what} in {address}/" in record.getMessage()
        assert "Set FWPKM_JAX_CACHE to another folder, or to off." in record.getMessage()


@pytest.mark.parametrize("command", ["train recall --run_dir run", "demo"])
def test_an_address_of_no_bucket_is_refused_before_anything_is_compiled(
    command, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FWPKM_JAX_CACHE", "ftp://bucket/programs")
    assert main(command.split()) == 2
    assert "FWPKM_JAX_CACHE='ftp://bucket/programs' is an address of a kind" in (
        capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


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
