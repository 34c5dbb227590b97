"""Compiled programs are kept on disk or in a bucket by the commands, and found again."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from fwpkm_jax.cli import main
from fwpkm_jax.storage import compile_cache as module
from fwpkm_jax.storage.addresses import StoreError
from fwpkm_jax.storage.compile_cache import compile_cache, default_folder
from fwpkm_jax.storage.stores import Store
from tests.training import mesh_flags
from tests.training.runs.stores import KINDS, a_store

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
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
    with compile_cache() as folder:
        pass
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
    with compile_cache() as folder:
        assert folder is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
    monkeypatch.setenv("FWPKM_JAX_CACHE", str(tmp_path / "mine"))
    with compile_cache() as folder:
        pass
    assert folder is not None
    assert folder.parent == tmp_path / "mine"


def test_jaxs_own_setting_is_left_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FWPKM_JAX_CACHE", str(tmp_path / "mine"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3.0)
    with compile_cache() as folder:
        assert folder == tmp_path / "theirs"
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 3.0
    assert not (tmp_path / "mine").exists()


def test_a_folder_that_cannot_be_made_is_one_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FWPKM_JAX_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING), compile_cache() as folder:
        assert folder is None
    (record,) = caplog.records
    assert "Set FWPKM_JAX_CACHE to another folder, or to off." in record.getMessage()
    assert jax.config.values["jax_compilation_cache_dir"] is None


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes this process that of a new machine: other temporary files, no program in memory."""

    def start(name):
        assert not list(tmp_path.glob("machine-*/fwpkm-programs-*"))
        place = tmp_path / f"machine-{name}"
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        jax.clear_caches()

    yield start
    compilation_cache.reset_cache()


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


@pytest.mark.by_default("memory")
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
            machine(name)
            compiled.clear()
            with compile_cache() as folder:
                assert compile_one() == [1, 2, 3, 4]
            assert not folder.exists()
            assert jax.config.values["jax_compilation_cache_dir"] is None
            assert bool(compiled) == (name == "first")
            kept.append(Store(address).sizes())
        assert kept[0] == kept[1]
        (name,) = programs(address)
        assert name.startswith(f"{os.uname().machine}-")


def test_new_programs_are_written_while_the_command_runs_and_half_ones_are_not(
    machine, monkeypatch
):
    monkeypatch.setattr(module, "EVERY", 0.02)
    with a_store("memory", monkeypatch) as address:
        monkeypatch.setenv("FWPKM_JAX_CACHE", address)
        machine("one")
        with compile_cache() as folder:
            compile_one()
            deadline = time.monotonic() + 20
            while not programs(address) and time.monotonic() < deadline:
                time.sleep(0.02)
            (written,) = programs(address)
            content = (folder / written.rpartition("/")[2]).read_bytes()
            half = f".jit_small_program-x-cache.{'0' * 16}.tmp"
            (folder / half).write_bytes(content[: len(content) // 2])
            (folder / "other.txt").write_text("")
        assert programs(address) == [written]
        assert Store(address).read(written) == content
        assert not any(name.endswith("other.txt") for name in Store(address).sizes())


def test_a_program_that_another_machine_wrote_meanwhile_stays(machine, monkeypatch):
    with a_store("memory", monkeypatch) as address:
        monkeypatch.setenv("FWPKM_JAX_CACHE", address)
        machine("one")
        with compile_cache():
            compile_one()
        (name,) = programs(address)
        Store(address).remove(name)
        machine("two")
        with compile_cache():
            compile_one()
            Store(address).write(name, b"theirs")
        assert Store(address).read(name) == b"theirs"


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

        def session(name):
            machine(name)
            jax.config.update("jax_compilation_cache_dir", None)
            compiled.clear()
            caplog.clear()
            with compile_cache(), caplog.at_level(logging.WARNING):
                assert compile_one() == [1, 2, 3, 4]
            said = [x.getMessage() for x in caplog.records if "damaged" in x.getMessage()]
            return any("small_program" in x for x in compiled), len(said)

        assert session("one") == (True, 0)
        assert session("two") == (False, 0)
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
        assert session("three") == (True, 1)
        assert session("four") == (False, 0)


@pytest.mark.parametrize("lost", ["listed", "download", "upload"])
def test_a_bucket_that_cannot_be_read_or_written_costs_one_warning(
    lost, machine, monkeypatch, caplog
):
    with a_store("memory", monkeypatch) as address:
        monkeypatch.setenv("FWPKM_JAX_CACHE", address)
        monkeypatch.setattr(module, "EVERY", 0.02)
        machine("one")
        with compile_cache():
            compile_one()

        def fail(self, *_):
            raise StoreError(f"{self} cannot be read (PermissionError: no)")

        monkeypatch.setattr(Store, lost, fail)
        machine("two")
        with caplog.at_level(logging.WARNING, logger="fwpkm_jax"), compile_cache() as folder:
            assert (folder is None) == (lost != "upload")
            for number in (2, 3):
                compile_one(number)
                time.sleep(0.06)
        (record,) = [x for x in caplog.records if x.name.startswith("fwpkm_jax")]
        what = "written" if lost == "upload" else "read"
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
