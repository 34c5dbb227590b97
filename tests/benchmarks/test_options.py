"""The options of every program of benchmarks/: how they are read, and that each one is tried."""

import ast
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.options import from_json, parse, parser_of, to_json
from benchmarks.processes import ROOT

PROGRAMS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if "parse(Options, argv" in path.read_text(encoding="utf-8")
]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Says what it does."""

    folder: Path
    """Where."""
    size: Literal["tiny", "paper"] = "tiny"
    rates: tuple[float, ...] = (0.5,)
    """100% of
    them."""
    length: int | None = None
    files: tuple[Path, ...] = ()
    peer_python: Path | None = None
    run: bool = True


def test_options_are_read_by_their_types():
    line = "--folder a --size paper --rates 1 2e-3 --length 4 --files x y --peer-python p --no-run"
    read = parse(Sample, line.split())
    expected = Sample(
        folder=Path("a"),
        size="paper",
        rates=(1.0, 2e-3),
        length=4,
        files=(Path("x"), Path("y")),
        peer_python=Path("p"),
        run=False,
    )
    assert read == expected
    assert parse(Sample, ["--folder", "a"]) == Sample(folder=Path("a"))
    assert parse(Sample, ["--folder", "a", "--peer_python", "p", "--rates"]) == Sample(
        folder=Path("a"), peer_python=Path("p"), rates=()
    )


@pytest.mark.parametrize("line", ["", "--folder a --size large", "--folder a --lenght 4"])
def test_a_missing_wrong_or_unknown_option_is_refused(line, capsys):
    with pytest.raises(SystemExit):
        parse(Sample, line.split())
    assert re.search(r"folder|tiny.*paper|lenght", capsys.readouterr().err)


def test_help_shows_the_text_below_a_field_and_its_default():
    text = " ".join(parser_of(Sample, description="Does.").format_help().split())
    assert "Does." in text
    assert "100% of them. (default: 0.5)" in text


def test_json_keeps_the_options():
    options = Sample(folder=Path("a"), rates=(1.0, 2.0), peer_python=Path("p"))
    read = from_json(Sample, to_json(options))
    assert read == options
    assert isinstance(read.rates, tuple)
    assert isinstance(read.peer_python, Path)


def tried() -> dict[str, set[str]]:
    """By program, the options that this folder's tests pass to `run` and `run_apart`."""
    found: dict[str, set[str]] = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            named: dict[str, set[str]] = {}  # Command lines that the function keeps in variables.
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    named[node.targets[0].id] = _options_in(node.value)
            for node in ast.walk(function):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                    continue
                if node.func.id in ("run", "run_apart") and isinstance(node.args[0], ast.Constant):
                    used = found.setdefault(f"benchmarks.{node.args[0].value}", set())
                    used |= _options_in(node)
                    for part in ast.walk(node):
                        if isinstance(part, ast.Name):
                            used |= named.get(part.id, set())
    return found


def _options_in(node: ast.AST) -> set[str]:
    constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return {word for word in constants if isinstance(word, str) and word.startswith("--")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_is_used_by_a_test(name):
    parser = parser_of(importlib.import_module(name).Options)
    used = tried().get(name, set())
    unused = [
        action.option_strings[0]
        for action in parser._actions
        if action.dest != "help" and not used & set(action.option_strings)
    ]
    assert not unused, f"No call run({name.removeprefix('benchmarks.')!r}, ...) passes {unused}."


def test_all_programs_are_found():
    assert len(PROGRAMS) == 46
    for path in (ROOT / "benchmarks").rglob("*.py"):
        if path.parent.name == "seeded_faults":  # Reads its own options; measures tests, not speed.
            continue
        text = path.read_text(encoding="utf-8")
        assert ("__main__" in text) == (
            "parse(Options, argv" in text or path.stem.startswith(("peer_", "processes"))
        ), path
