"""Finds the programs of a folder, and the options that no test passes to them."""

import ast
import functools
import importlib
from pathlib import Path

from benchmarks.options import parser_of
from benchmarks.processes import ROOT


def programs_of(folder: str) -> list[str]:
    """Full names of the programs below a folder of the repository that read `Options`."""
    return [_name(path) for path in _sources(folder) if "parse(Options, argv" in path.read_text()]


def with_a_command(folder: str) -> list[str]:
    """Full names of the files below a folder that `python -m` runs."""
    return [_name(path) for path in _sources(folder) if "__main__" in path.read_text()]


def unused_options(program: str, tests: Path) -> list[str]:
    """The options of a program that no test of the folder `tests` passes to `run(program, ...)`."""
    used = _tried(tests).get(program, set())
    return [
        action.option_strings[0]
        for action in parser_of(importlib.import_module(program).Options)._actions
        if action.dest != "help" and not used & set(action.option_strings)
    ]


def _sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in found if "tests" not in path.relative_to(ROOT).parts]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def _tried(tests: Path) -> dict[str, set[str]]:
    """By program, the options that tests pass to `run` and `run_apart`."""
    found: dict[str, set[str]] = {}
    for path in tests.glob("test_*.py"):
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
                    used = found.setdefault(node.args[0].value, set())
                    used |= _options_in(node)
                    for part in ast.walk(node):
                        if isinstance(part, ast.Name):
                            used |= named.get(part.id, set())
    return found


def _options_in(node: ast.AST) -> set[str]:
    constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return {word for word in constants if isinstance(word, str) and word.startswith("--")}
