"""`fwpkm` as a program: what it says, how fast it answers, and the names it gives."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fwpkm_jax import __version__
from fwpkm_jax.cli import main
from fwpkm_jax.cli.generate_command import GenerateOptions
from fwpkm_jax.cli.options import parse_options
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
    assert main([name, "--help"]) == 0
    assert f"usage: fwpkm {name}" in capsys.readouterr().out


def test_an_unknown_command_gets_the_nearest_name(capsys):
    assert main(["trian"]) == 2
    assert "'trian' is none of demo, train, configs, eval" in (shown := capsys.readouterr().err)
    assert shown.endswith("the nearest name is train.\n")


REFUSED = (
    # What tyro says.
    ("train recall --training.steps abc", "--training.steps: invalid literal for int() with base"),
    ("train recall --training.steps", "Missing value for argument '--training.steps'"),
    ("train recall --optimizer.betas 0.1", "Missing value for argument '--optimizer.betas'"),
    ("train recall --model.tie_embeddings no", "invalid choice 'no' for argument '--model.tie_"),
    ("train recall --trainig.steps 3", "Perhaps you meant: --training.steps INT"),
    ("train recall --model_dim 3", "Perhaps you meant: --model.model_dim INT"),
    ("train recall --model.attention.yarn.facto 3", "Missing from fwpkm train recall: --model.att"),
    ("train recall again", "Unrecognized options: again"),
    ("train recall training.steps=3", "Unrecognized options: training.steps=3"),
    ("eval", "RUN Run directory, as `fwpkm train` wrote it. (required)"),
    ("chat r", "--memory STR Name of the memory, which is loaded, or begun, and"),
    ("import", "Expected one of {weights, release, hf, gguf}."),
    ("import hfx a", "Available subcommands: weights, release, hf, gguf"),
    ("import hf a r --dtype int8", "invalid choice 'int8' for argument '--dtype'"),
    # What sections of a configuration say.
    (
        "train recall --training.steps 0",
        "training: steps=0 is too small; use 1 or more",
    ),
    ("train recall --model.mixers swa omegas", "model: mixers[1]='omegas' is none of attention"),
    ("train recall --model.mixers swa {}", "class=None is none of ['AttentionConfig'"),
    ("train recall --model.mixers swa {x", "model.mixers='{x': Expecting property name"),
    ("train recall --model.attention.num_kv_heads 3", "num_heads=4 is not a multiple of num_kv"),
    ("train recall --seed -1", "seed=-1 is too small; use 0 or more."),
    (
        "generate r --sampling.temperature -1",
        "sampling: temperature=-1.0 is too small",
    ),
)
ONE_LINE = (
    ("train recall --lr 3e-4", "--lr is not an option; use --optimizer.learning_rate."),
    ("train --base r", "--base r starts a new run; name its --run_dir."),
    ("train --add_memory", "--add_memory puts memories into a trained run; name it, --base RUN."),
    ("train recal", "There is no shipped config 'recal'; the nearest name is recall. fwpkm conf"),
    ("train recall --plugins no.such", "plugins names the module no.such, which is not installed"),
    (
        "train recall --model.fast_weight.rule.num_subkeys 65536",
        "The state of this run takes 1.1 TB (params 481 kB, optimizer 963 kB, memory 1.1 TB, "
        "gradients 481 kB) of each device, which has",
    ),
    ("eval nowhere", "nowhere/config.json does not exist; nowhere holds no run."),
    ("generate r --memories x", "memories='x' has no effect without --memory NAME"),
)


@pytest.mark.parametrize(("arguments", "said"), REFUSED + ONE_LINE)
def test_every_command_says_what_is_wrong(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    name, *others = arguments.split()
    assert main([name, *others]) == 2
    shown = capsys.readouterr().err
    assert said in " ".join(shown.replace("│", " ").split())
    if (arguments, said) in ONE_LINE:
        assert shown.startswith(f"fwpkm {name}: ")
        assert shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_follows_an_equals_sign_is_a_value():
    options = parse_options(GenerateOptions, ["r", "--prompt=-- SELECT"], "fwpkm generate")
    assert options.prompt == "-- SELECT"


def test_the_shipped_configs_are_listed_with_a_line_for_each_file(capsys):
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [name for line in lines if not line.startswith(" ") for name in line.split()]
    assert sorted(names) == sorted(shipped_configs())
    assert all(len(line) > 20 for line in lines if line.startswith("    "))
    needs = [line for line in lines if line.startswith("    Needs ")]
    assert any(x.startswith("    Needs data/longcrawl64.train.bin, data/fin") for x in needs)
    command = "    python -m fwpkm_jax.data.prepare SOURCE writes them (docs/howto/data.md)."
    assert lines.count(command) == len(needs)
    assert importlib.util.find_spec("fwpkm_jax.data.prepare.__main__") is not None
    assert (ROOT / "docs" / "howto" / "data.md").exists()


DESCRIBED = [*COMMANDS, "export hf", *(f"import {x}" for x in ("weights", "release", "hf", "gguf"))]


@pytest.mark.parametrize("command", DESCRIBED)
def test_a_commands_help_is_wrapped_once_at_the_terminals_width(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    usage, *lines = capsys.readouterr().out.splitlines()
    assert usage.startswith("usage: ")
    assert max(map(len, lines)) <= 80
    texts = [line.rstrip() if line.startswith(8 * " ") else "" for line in lines]
    pairs = [(text, after) for text, after in itertools.pairwise(texts) if text and after]
    # Where the next line's first word would have fitted, the text was broken before.
    assert not [x for x in pairs if len(f"{x[0]} {x[1].split()[0]}") < 80]
    assert pairs or command in ("configs", "import", "report")  # Whose texts fit into a line.


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_the_version(name, capsys):
    assert main([name, "--version"]) == main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n" * 2


def test_help_and_the_programs_load_no_jax():
    """Data workers import the program that started them; help should appear at once."""
    code = "import sys, fwpkm_jax.cli, train; fwpkm_jax.cli.main(['--help'])"
    done = run("-c", f"{code}; print('jax' in sys.modules)")
    assert done.stdout.endswith("False\n"), done.stderr


@pytest.mark.slow
def test_an_answer_on_a_cpu_needs_neither_grain_nor_the_language_of_kernels():
    """Each takes half a second to import, and the first token waits for it."""
    code = "import sys, fwpkm_jax.cli.generate_command, fwpkm_jax.cli.chat_command"
    names = "{'jax', 'grain', 'jax.experimental.pallas'}"
    done = run("-c", f"{code}; print({names} & set(sys.modules))")
    assert done.stdout == "{'jax'}\n", done.stderr


@pytest.mark.thorough(
    "program0-arguments0-2-train.py: There is no shipped config 'recal'; the nearest"
)
@pytest.mark.slow_cases("program3-arguments3-2-generate.py: nowhere/config.json does not exist")
@pytest.mark.parametrize(
    ("program", "arguments", "code", "said"),
    [
        (["train.py"], ["recal"], 2, "train.py: There is no shipped config 'recal'; the nearest"),
        (["-m", "fwpkm_jax"], ["train", "--lr", "1"], 2, "fwpkm train: --lr is not an option;"),
        (["eval.py"], ["nowhere"], 2, "eval.py: nowhere/config.json does not exist"),
        (["generate.py"], ["nowhere"], 2, "generate.py: nowhere/config.json does not exist"),
    ],
)
def test_the_programs_of_a_checkout_are_the_commands(program, arguments, code, said):
    done = run(*program, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_a_name_and_a_path_give_the_same_shipped_config():
    """The names work in any directory; the checkout also offers files of one run in `configs/`."""
    assert load_config("recall") == load_config(shipped_configs()["recall"])
    assert load_config("recall") == load_config(ROOT / "configs" / "recall.py")


def test_a_file_of_several_runs_names_them():
    path = shipped_configs()["fa"]
    assert load_config(f"{path}:fa") == load_config("fa")
    with pytest.raises(
        ValueError, match=r"configs\.py defines no get_config.*configs\.py:NAME names one of gdn, "
    ):
        load_config(path)
    with pytest.raises(ValueError, match=r"no run 'fb'.* one of gdn, "):
        load_config(f"{path}:fb")


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
    with pytest.raises(FileNotFoundError, match="the shipped config of that name is fa"):
        load_config("configs/fa.py")
    with pytest.raises(FileNotFoundError, match=r"'fb'.*the path of a file ends in \.py"):
        load_config("fb")
