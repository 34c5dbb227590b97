"""`fwpkm` as a program: what it says, how fast it answers, and the names it gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fwpkm_jax.cli import main
from fwpkm_jax.cli.program import COMMANDS
from fwpkm_jax.config import load_config, shipped_configs

ROOT = Path(__file__).parents[2]


def run(*command, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_help_names_every_command_on_a_screen(capsys):
    assert main([]) == main(["--help"]) == main(["-h"]) == 0
    shown = capsys.readouterr().out
    short = shown[: len(shown) // 3]
    assert shown == short * 3
    assert all(f"  {name} " in short for name in COMMANDS)
    assert len(short.splitlines()) <= 24
    assert all(len(line) <= 80 for line in short.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_options(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: fwpkm {name}" in capsys.readouterr().out


def test_an_unknown_command_gets_the_nearest_name(capsys):
    assert main(["trian"]) == 2
    assert "'trian' is none of train, eval" in (shown := capsys.readouterr().err)
    assert shown.endswith("the nearest name is train.\n")


def test_help_and_the_programs_load_no_jax():
    """Data workers import the program that started them; help should appear at once."""
    code = "import sys, fwpkm_jax.cli, train; fwpkm_jax.cli.main(['--help'])"
    done = run("-c", f"{code}; print('jax' in sys.modules)")
    assert done.stdout.endswith("False\n"), done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "arguments", "code", "said"),
    [
        (["train.py"], ["recal"], 2, "train.py: There is no shipped config 'recal'; the nearest"),
        (["-m", "fwpkm_jax"], ["train", "--sead", "1"], 2, "fwpkm train: --sead is not an option;"),
        (["eval.py"], ["nowhere"], 2, "eval.py: nowhere/config.json does not exist"),
        (["generate.py"], ["nowhere"], 2, "generate.py: nowhere/config.json does not exist"),
    ],
)
def test_the_programs_of_a_checkout_are_the_commands(program, arguments, code, said):
    done = run(*program, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["recall", "study/fa", "ablations/dot_scores"])
def test_a_name_and_a_path_give_the_same_shipped_config(name):
    """The names work in any directory; the checkout also offers them as files of `configs/`."""
    assert load_config(name) == load_config(shipped_configs()[name])
    assert load_config(name) == load_config(ROOT / "configs" / f"{name}.py")


def test_a_config_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "base_of_two.py").write_text("from fwpkm_jax.configs.recall import get_config\n")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "import base_of_two\n"
        "def get_config():\n"
        "    return replace(base_of_two.get_config(), seed=7)\n"
    )
    before = list(sys.path)
    assert load_config(tmp_path / "mine.py").seed == 7
    assert sys.path == before


def test_a_shipped_config_asked_for_as_a_file_elsewhere_gets_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="the shipped config of that name is study/fa"):
        load_config("configs/study/fa.py")
    with pytest.raises(FileNotFoundError, match=r"'study/gd'.*the path of a file ends in \.py"):
        load_config("study/gd")
