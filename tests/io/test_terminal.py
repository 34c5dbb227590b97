"""Failures as the user sees them."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fwpkm_jax.cli import main
from fwpkm_jax.config import load_config
from fwpkm_jax.data import TextData
from fwpkm_jax.io import status_line
from fwpkm_jax.io.status_line import StatusLine, progress_shown, watched
from fwpkm_jax.io.terminal import report, say_what_lasts, visible
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.storage import addresses

ROOT = Path(__file__).parents[2]


def _caught(function):
    with pytest.raises(ValueError, match=r".") as caught:
        function()
    return caught.value


def test_a_mistake_of_the_user_is_one_line(capsys):
    error = _caught(lambda: FwPKM(key_dim=7))
    assert report("train.py", error) == 2
    assert capsys.readouterr().err == f"train.py: {error}\n"


def test_an_error_inside_a_library_keeps_its_traceback(capsys):
    error = _caught(lambda: np.reshape(np.zeros(3), (2, 2)))
    assert report("train.py", error) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_the_system_is_one_line(capsys, tmp_path):
    with pytest.raises(OSError, match="gone") as error:
        (tmp_path / "gone" / "x").write_text("")
    assert report("fwpkm report", error.value) == 1
    line = f"fwpkm report: {tmp_path / 'gone' / 'x'}: No such file or directory\n"
    assert capsys.readouterr().err == line


def test_control_characters_are_escaped_and_texts_of_people_are_not():
    text = "naïve 日本 \u05d0\u200f nb\u00a0sp 👩\u200d🔬\n\tx"
    assert visible(text) == text
    assert visible("\x1b[2J\r\x00\x7f\x9b\u202e\u2028\ud800") == (
        r"\x1b[2J\r\x00\x7f\x9b\u202e\u2028\ud800"
    )
    stream = io.StringIO()
    StatusLine(stream).say("a\x1b[2J")
    StatusLine(stream).show("b\x07")
    assert stream.getvalue() == "a\\x1b[2J\nb\\x07\n"


@pytest.mark.parametrize(
    "arguments",
    [
        *("train recall --run_dir ftp://bucket/run", "train recall --run_dir gs:/bucket/run"),
        *(
            "train --base ftp://b/r --run_dir x",
            "train books_tiny --data.tokenizer ftp://b/t.model",
        ),
        *("memories ftp://b/r", "chat r --memory a --memories ftp://b/m", "export r ftp://b/out"),
        *("demo --memory gs://b/m", "chat r --memory gs:/b/m/a", "generate r --read gs://b/t"),
        *("export hf r gs://b/out --push o/n", "import weights ftp://b/x run"),
        *("import hf x ftp://b/run", "import weights x ftp://b/run"),
        "import release gs://b/x run --config recall",
    ],
)
def test_an_address_is_refused_before_anything_is_made(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(arguments.split()) == 2
    shown = capsys.readouterr().err
    assert "is an address" in shown
    assert "mount the bucket" in shown or "use gs://, s3:// or memory://" in shown
    assert list(tmp_path.iterdir()) == []


def test_addresses_are_refused_in_python_too():
    with pytest.raises(ValueError, match=r"run_dir='ftp://b/r' is an address of a kind"):
        type(load_config("recall"))(
            model=load_config("recall").model, data=load_config("recall").data, run_dir="ftp://b/r"
        )
    with pytest.raises(ValueError, match=r"train_paths='ftp://b/t' is an address of a kind"):
        TextData(train_paths=("ftp://b/t",))


@pytest.mark.thorough
@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
@pytest.mark.parametrize(
    "command",
    [
        "train books_tiny --data.train_paths SCHEME://b/t.txt --data.reading stream",
        *("train recall --run_dir SCHEME://b/run", "train --resume SCHEME://b/run"),
        *("eval SCHEME://b/run", "report SCHEME://b/run", "generate SCHEME://b/run --prompt a"),
        *("export SCHEME://b/run out", "chat SCHEME://b/run --memory a"),
        "train --base SCHEME://b/run --run_dir new",
        *("import hf x SCHEME://b/run", "import release x SCHEME://b/run"),
        *("memories SCHEME://b/run", "chat run --memory SCHEME://b/m/a"),
        "generate run --memory a --memories SCHEME://b/m",
    ],
)
def test_a_store_whose_package_is_missing_is_refused_before_training(
    capsys, tmp_path, monkeypatch, scheme, package, command
):
    addresses._file_system.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    if (registry := sys.modules.get("fsspec.registry")) is not None:
        # It keeps the class of a package that is installed and was used before.
        monkeypatch.delitem(registry._registry, scheme, raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(command.replace("SCHEME", scheme).split()) == 2
    assert capsys.readouterr().err == (
        f"fwpkm {command.split()[0]}: {scheme}:// is read and written with the package {package}, "
        "which is not installed; in a checkout of fwpkm_jax run: pip install -e '.[buckets]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def _mapped(pid):
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.thorough("0.12")
@pytest.mark.parametrize("delay", [0.12, 0.3, 0.6, 1.0, 1.5])
def test_an_interrupt_while_it_imports_is_one_line(delay, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "fwpkm_jax", "train", "recall", "--run_dir", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while "numpy" not in _mapped(process.pid) and time.monotonic() < deadline:
        time.sleep(0.005)  # Then its own imports have begun.
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.count("\n") <= 1
    assert "Traceback" not in errors
    assert out or errors in ("fwpkm: interrupted.\n", "fwpkm train: interrupted.\n")


def test_a_silent_minute_is_explained_to_a_terminal_alone(capsys, monkeypatch):
    say_what_lasts("Compiling ...")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    say_what_lasts("Compiling ...")
    assert capsys.readouterr() == ("", "Compiling ...\n")


def test_how_far_a_command_is_stands_in_one_line_of_a_terminal_alone(capsys, monkeypatch):
    monkeypatch.setattr(status_line, "_SECONDS", -1.0)
    with progress_shown("Reading ..."):
        assert list(watched([7, 8], "arrays read")) == [7, 8]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_shown("Reading ..."):
        assert list(watched([7, 8, 9], "arrays read")) == [7, 8, 9]
        assert list(watched([], "arrays read")) == []
    assert list(watched([7, 8], "arrays read")) == [7, 8]
    lines = [f"\rarrays read: {number}/3  ETA 0:00\x1b[K" for number in (1, 2)]
    assert capsys.readouterr() == ("", f"Reading ...\n{''.join(lines)}\r\x1b[K")
