"""Bring-up where only jax, flax, optax, orbax, chex, numpy and pytest are, and some wheels."""

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import processes
from benchmarks.bring_up import suite
from benchmarks.bring_up.files import read_lines
from tests.benchmarks.programs import result

BARE = Path(__file__).parent / "bare"
PARTS = suite.parts(suite.Options(out=Path("out")))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Wheels of the packages that travel along."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in ("jaxtyping", "wadler_lindig"):
        package = Path(importlib.import_module(name).__file__ or "").parent
        with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
            for file in package.rglob("*.py"):
                wheel.write(file, Path(name, file.relative_to(package)))
    return folder


def python(code: str, *paths: Path) -> str:
    variables = {"PYTHONPATH": os.pathsep.join(map(str, (BARE, processes.ROOT, *paths)))}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_every_part_can_be_imported_with_the_wheels(wheels, tmp_path):
    programs = ["benchmarks.bring_up.cases", "benchmarks.compiled.executables"]
    programs += ["benchmarks.speed.train_step", *(module for module, *_ in PARTS.values())]
    lines = [f"import {', '.join(programs)}", "import sys, sitecustomize"]
    lines += ["print(len(sitecustomize.ABSENT), sitecustomize.ABSENT & set(sys.modules))"]
    printed = python("\n".join(lines), suite.unpack(wheels, tmp_path)).split(maxsplit=1)[1]
    assert eval(printed) == {"jaxtyping", "wadler_lindig"}


def test_the_suite_itself_needs_none_of_the_absent_packages():
    packages = ("tyro", "beartype.door", "grain", "jaxtyping")
    lines = ["import benchmarks.bring_up.suite, importlib, sys", "print('jax' in sys.modules)"]
    lines += [f"for name in {packages!r}:", "  try: importlib.import_module(name)"]
    lines += ["  except ModuleNotFoundError as error: print(error)"]
    loaded, *errors = python("\n".join(lines)).splitlines()
    assert loaded == "False"
    assert errors == [f"No module named {name.split('.')[0]!r}" for name in packages]


@pytest.mark.slow
def test_the_whole_suite_runs(tmp_path, monkeypatch, wheels):
    monkeypatch.setenv("PYTHONPATH", f"{BARE}{os.pathsep}{processes.ROOT}")
    monkeypatch.setenv("PATH", "")  # Neither git nor pip.
    out = tmp_path / "out"
    command = ["benchmarks.bring_up", "--out", str(out), "--size", "tiny", "--jobs", "2"]
    command += ["--wheels", str(wheels), "--cache", str(tmp_path / "cache")]
    command += ["--seconds", "3000", "--part-seconds", "900", "--operations", "value_scan"]
    assert suite.run_part(command, limit_s=3600) is None
    found = result(out / "results.json")
    assert list(found) == list(PARTS)
    assert all(part["status"] == "done" and part["result"] for part in found.values())
    assert set(found["cases"]["result"]) == {"agrees"}
    assert set(found["steps"]["result"]) == {"timed"}
    rows = read_lines(out / "steps.jsonl")
    variants = {(row["model"], row["variant"]) for row in rows}
    assert {("gdn", "all"), ("gdn__fwpkm2_6_10", "baseline")} <= variants
    assert len({row["final_loss"] for row in rows if row["model"] == "gdn"}) == 1
    assert all(row["differing"] == [] for row in rows if row["variant"] == "all")
    assert set(result(out / "profiles.json")) == {"gdn/all", "gdn__fwpkm2_6_10/all"}
    parity = found["parity"]["result"]
    assert parity["tests"] == parity["skipped"] > 100
    files = ["cases.jsonl", "compiled", "profiles.json", "results.json", "steps.jsonl"]
    assert sorted(x.name for x in out.iterdir()) == [*files, "verdicts.json"]
    assert len(list((out / "compiled").iterdir())) == 2
    # The next call loads the executables, and measures nothing of the rest again.
    command[2] = str(tmp_path / "next")
    command += ["--earlier", str(out), "--parts", "device", "cases", "steps", "decode"]
    assert suite.run_part(command, limit_s=600) is None
    rows = read_lines(tmp_path / "next" / "steps.jsonl")
    carried = {row["model"]: row for row in rows if row["variant"] == "carried"}
    assert {row["model"]: row["final_loss"] for row in rows if row["variant"] == "all"} == {
        model: row["final_loss"] for model, row in carried.items()
    }
