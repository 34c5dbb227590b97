"""A command line's option names, and what a command says when it fails."""

from __future__ import annotations

import dataclasses
import sys
import traceback
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fwpkm_jax.literals import nearest

_PACKAGE = Path(__file__).parent


def report(program: str, error: Exception) -> int:
    """Prints why `program` failed; its exit code.

    An error raised by this package's own code on purpose reads as one clear line (exit code 2).
    One raised inside a library is nobody's message to the user and keeps its traceback (1).
    """
    frames = traceback.extract_tb(error.__traceback__)
    deliberate = bool(frames) and _PACKAGE in Path(frames[-1].filename).resolve().parents
    if deliberate:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1


def separate_options(arguments: Sequence[str]) -> list[str]:
    """Options with underscores and their values apart: `--run-dir=x` as `--run_dir`, `x`."""
    separate = []
    for argument in arguments:
        if argument.startswith("--"):
            name, *value = argument.split("=", 1)
            separate += [name.replace("-", "_").replace("__", "--", 1), *value]
        else:
            separate.append(argument)
    return separate


def check_options(arguments: Sequence[str], config: Any) -> None:
    """Raises ValueError for an option that does not exist; tyro does not always know a near one.

    Args:
      arguments: from `separate_options`.
      config: the dataclass whose fields the options set.
    """
    names = {"--help", *_option_names(config)}
    for argument in arguments:
        if argument.startswith("--") and argument not in names:
            # An option whose last part is the whole name is meant, rather than a similar one.
            own = [n for n in sorted(names) if n.rpartition(".")[2] == argument.removeprefix("--")]
            hint = f"; the nearest name is {own[0]}" if own else nearest(argument, names)
            hint = hint or "; --help lists the options"
            raise ValueError(f"{argument} is not an option{hint}.")


def _option_names(config: Any, prefix: str = "--") -> Iterator[str]:
    """Every option of a configuration, those of sections that are None but could be set too."""
    cls = config if isinstance(config, type) else type(config)
    hints = typing.get_type_hints(cls)
    for name in (f.name for f in dataclasses.fields(cls)):
        yield f"{prefix}{name}"
        section = None if isinstance(config, type) else getattr(config, name)
        if dataclasses.is_dataclass(section):
            yield from _option_names(section, f"{prefix}{name}.")
        elif section is None:
            options = [hints[name], *typing.get_args(hints[name])]
            for option in options:
                if isinstance(option, type) and dataclasses.is_dataclass(option):
                    yield from _option_names(option, f"{prefix}{name}.")
