"""The built package in a new environment, away from the checkout: it trains and evaluates.

The environment is new and holds the wheel alone; its dependencies are those of the environment that
runs the test, which a path file lends (`test_metadata.py` checks that they are the declared ones).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import fwpkm_jax

ROOT = Path(__file__).parents[2]
SOURCES = ("fwpkm_jax", "pallas_kernels", "pyproject.toml", "README.md", "LICENSE")
# A recall run of seconds: four sequences of 64 tokens, three steps.
SMALL = [
    *["--data.length", "64", "--data.num_facts", "4", "--data.min_distance", "16"],
    *["--model.window", "8", "--model.fast_weight.chunk_size", "16", "--training.steps", "3"],
    *["--training.batch_size", "4", "--training.memory.groups", "4"],
    *["--training.validation_batches", "1"],
]

pytestmark = pytest.mark.slow


def call(*command, cwd):
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / "src" / name, ignore=skip)
        else:
            shutil.copy(source, folder / "src" / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    call(*pip, "--wheel-dir", folder, folder / "src", cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def home(wheel, tmp_path_factory):
    """An empty folder whose `env` has the wheel installed."""
    folder = tmp_path_factory.mktemp("home")
    venv.create(folder / "env", with_pip=False)
    paths = {"base": str(folder / "env"), "platbase": str(folder / "env")}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    pip = [sys.executable, "-m", "pip", "--python", folder / "env" / "bin" / "python"]
    call(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    # A folder named in a path file is searched, but its own path files are not read: an editable
    # installation in it stays invisible.
    lent = "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (packages / "dependencies.pth").write_text(lent + "\n")
    return folder


def test_the_wheel_holds_all_that_a_user_needs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(ROOT).as_posix()
        for folder in ("fwpkm_jax", "pallas_kernels")
        for path in (ROOT / folder).glob("**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names >= sources
    assert {name.split("/")[0] for name in names} == {
        "fwpkm_jax",
        "pallas_kernels",
        f"fwpkm_jax-{fwpkm_jax.__version__}.dist-info",
    }
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_the_installed_package_trains_and_evaluates_in_an_empty_folder(home):
    bin = home / "env" / "bin"
    code = (
        "import importlib.metadata as metadata, fwpkm_jax;"
        "print(fwpkm_jax.__file__, fwpkm_jax.__version__, metadata.version('fwpkm-jax'))"
    )
    file, *versions = call(bin / "python", "-c", code, cwd=home).split()
    versions += call(bin / "fwpkm", "--version", cwd=home).split()
    assert Path(file).is_relative_to(home / "env")
    assert versions == [fwpkm_jax.__version__] * 3

    assert "Finished 3 steps" in call(bin / "fwpkm", "train", "recall", *SMALL, cwd=home)
    run = home / "runs" / "recall"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    shown = call(bin / "fwpkm", "eval", "runs/recall", "--limit", "1", cwd=home)
    assert "report.html" in shown
    record = json.loads((run / "results" / "recall.json").read_text())
    assert record["provenance"]["checkpoint"]["step"] == 3
    assert (run / "results" / "report.html").is_file()


def test_the_notebook_for_an_empty_machine_runs_from_the_wheel(home, monkeypatch):
    notebook = json.loads((ROOT / "docs" / "tutorials" / "fresh_machine.ipynb").read_text())
    cells = ["".join(x["source"]) for x in notebook["cells"] if x["cell_type"] == "code"]
    assert "pip" in cells[0]
    pytest.importorskip("IPython")  # Of the extra docs, which a notebook has anyway.
    folder = home / "notebook"
    folder.mkdir()
    # As a program: plots go to no screen. The page says what STEPS does.
    monkeypatch.setenv("STEPS", "20")
    code = "import matplotlib; matplotlib.use('Agg')\n" + "\n".join(cells)
    (folder / "cells.py").write_text(code)
    shown = call(home / "env" / "bin" / "python", "cells.py", cwd=folder)
    assert "Finished 20 steps" in shown
    accuracy = dict(re.findall(r"^(writing|frozen|guessing) +([\d.]+)", shown, re.M))
    assert accuracy.keys() == {"writing", "frozen", "guessing"}
    assert abs(float(accuracy["frozen"]) - float(accuracy["guessing"])) < 0.05
    assert re.search(r"from each of 3 of 255 positions .* on moves nothing before it, ", shown)


def test_the_installed_package_reads_its_own_text(home):
    code = (
        "from fwpkm_jax.config import load_config; from fwpkm_jax.data import stream_documents;"
        "data = load_config('books_tiny').data;"
        "print(*(len(next(stream_documents(data, s)).tokens) for s in ('train', 'valid')))"
    )
    train, valid = map(int, call(home / "env" / "bin" / "python", "-c", code, cwd=home).split())
    assert train > valid > 50_000
