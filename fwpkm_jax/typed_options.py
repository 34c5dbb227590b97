"""A command line as an instance of a dataclass; whatever is wrong with it is one line."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tyro

from fwpkm_jax.literals import nearest, some

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TYPES = {"INT": "an integer", "FLOAT": "a number"}
_SEVERAL = {"INT": "integers", "FLOAT": "numbers"}
_HYPHENS = "; an option starts with two hyphens: --section.field VALUE"


def read_options(
    cls: Any,
    arguments: Sequence[str],
    *,
    program: str,
    like: Any = None,
    section: str = "",
    **settings: Any,
) -> Any:
    """What `tyro.cli` makes of a command line; its boxes of errors become one line.

    Args:
      cls: a dataclass.
      arguments: its command line, from `separate_options`.
      program: what the help calls the program.
      like: an instance, whose sections tell which names a section's errors speak of.
      section: what the names of these options begin with for the user; "": nothing.
      **settings: of `tyro.cli`.

    Raises:
      SystemExit: 0 after `--help`.
      ValueError: a value is of a wrong type or refused, or something is missing or too much; the
        message has whole names of options.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), _unwrapped(arguments):
            options = tyro.cli(
                cls, args=list(arguments), prog=program, use_underscores=True, **settings
            )
    except SystemExit as stop:
        if stop.code == 2:
            like = cls if like is None else like
            raise ValueError(_refusal(printed.getvalue(), arguments, like, section)) from None
        raise
    print(printed.getvalue(), end="", file=sys.stderr)  # Warnings.
    return options


def split_subcommand(
    arguments: Sequence[str], names: Iterable[str], *, program: str
) -> tuple[str, list[str]]:
    """The subcommand that a command line begins with, and the arguments after it.

    Raises:
      ValueError: there is none of these names.
    """
    names = list(names)
    if not arguments:
        raise ValueError(f"a command is missing: {_either(names)}; {program} --help explains them.")
    name, *rest = arguments
    if name not in names:
        raise ValueError(f"{name!r} is none of {', '.join(names)}{nearest(name, names)}.")
    return name, rest


@contextlib.contextmanager
def _unwrapped(arguments: Sequence[str]) -> Iterator[None]:
    """Lets tyro print errors without breaking lines, which would also break long words."""
    before = os.environ.get("COLUMNS")
    if not {"-h", "--help"} & {*arguments}:
        os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def _refusal(printed: str, arguments: Sequence[str], like: Any, section: str) -> str:
    """One line of what tyro prints as a box."""
    blocks = _blocks(printed)
    said = " ".join(" ".join(blocks[0]).split())
    start = f"--{section}." if section else "--"

    def whole(option: str) -> str:
        return option.replace("--", start, 1)

    if found := re.match(r"Error parsing (--\S+): ", said):
        described = next((block[1] for block in blocks[1:] if len(block) > 1), "")
        _, _, metavar = described.strip().partition(" ")
        return _wrong_value(whole(found[1]), _values(found[1], arguments), metavar)
    if found := re.match(
        r"invalid choice .* for argument '(--\S+)'\. Expected one of (.*)\.", said
    ):
        choices = sorted(ast.literal_eval(found[2]))
        return _wrong_value(whole(found[1]), _values(found[1], arguments), "|".join(choices))
    if found := re.match(r"Error parsing ([\w.]+): (.*)", said):
        return _refused_section(found[1], found[2], like, section)
    if found := re.match(r"Missing value for argument '(--\S+)'\.(?: Expected (\d+))?", said):
        values = _values(found[1], arguments)
        has = f"{len(values)} of {found[2]} values" if values else "no value"
        return f"{whole(found[1])} has {has}; --help says what it takes."
    if found := re.match(r"Unrecognized options: (.*)", said):
        hint = _HYPHENS if "=" in found[1] else "; --help shows what each option takes"
        return f"unexpected argument {found[1]}{hint}."
    if said.startswith("Missing from "):
        return " ".join(_missing(blocks[0][1:], whole))
    return said


def _blocks(printed: str) -> list[list[str]]:
    """The lines of a box without its frame, parted at its rules."""
    blocks: list[list[str]] = [[]]
    for line in _COLOURS.sub("", printed).splitlines()[1:]:
        line = line[2:].rstrip(" │╯")
        if line.strip() and not line.strip("─- "):
            blocks.append([])
        elif line.strip():
            blocks[-1].append(line)
    return [block for block in blocks if block] or [[printed]]


def _wrong_value(option: str, values: list[str], metavar: str) -> str:
    names: list[str] = re.findall(r"[\w.-]*\w", metavar)
    taken = _either([_TYPES.get(name, name) for name in dict.fromkeys(names)])
    if " " in metavar and len(set(names)) == 1 and names[0] in _SEVERAL:
        taken = f"{'any number of' if '...' in metavar else len(names)} {_SEVERAL[names[0]]}"
    wrong = next((value for value in values if value not in names), "")
    hint = nearest(wrong, [name for name in names if name not in _TYPES])
    return f"{option} is {' '.join(values)!r}; it takes {taken}{hint}."


def _either(names: Sequence[str]) -> str:
    """`a, b or c`; of many, the first and how many more there are."""
    if len(names) > 8:
        return some(names)
    first = ", ".join(names[:-1])
    return " or ".join([*([first] if first else []), *names[-1:]])


def _values(option: str, arguments: Sequence[str]) -> list[str]:
    """What a command line gives to an option."""
    last = len(arguments) - 1 - list(reversed(arguments)).index(option)
    values = arguments[last + 1 :]
    ends = [at for at, value in enumerate(values) if value.startswith("--")]
    return list(values[: min(ends, default=None)])


def _refused_section(name: str, message: str, like: Any, section: str) -> str:
    """What a section says of its fields, with the names that the command line has for them."""
    cls = like if isinstance(like, type) else type(like)
    inner = [] if name == cls.__name__ else name.split(".")
    path = ".".join(filter(None, [section, *inner]))
    if not path:
        return message
    part = like
    for step in inner:
        part = getattr(part, step, None)
    if part is None or not dataclasses.is_dataclass(part):
        return f"{path}: {message}"
    fields = "|".join(field.name for field in dataclasses.fields(part))
    qualified = re.sub(rf"(?<![\w.])({fields})(?=[=\[]|\.[a-z])", rf"{path}.\1", message)
    return qualified if f"{path}." in qualified else f"{path}: {qualified}"


def _missing(lines: Sequence[str], whole: Any) -> Iterator[str]:
    """A sentence for each argument that tyro lists with its help below it."""
    listed: list[list[str]] = []
    for line in lines:
        if re.match(r" {4}\S", line):
            listed.append([line.split()[0]])
        elif listed:
            listed[-1].append(line.strip())
    for name, *about in listed:
        text = " ".join(about).replace("(required)", "").strip().rstrip(".")
        yield f"{whole(name)} is missing: {text}."
