"""Reads a program's options from the command line with the standard library alone.

The first machine with a GPU may have jax and little else, so benchmarks do not use tyro.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


def parse(
    options: type[T], argv: Sequence[str] | None = None, *, description: str | None = None
) -> T:
    """The options that a command line states, as an instance of the dataclass `options`.

    Args:
      options: frozen dataclass whose fields are str, int, float, bool, Path, a Literal, a tuple of
        one of them of any length, or one of them or None. A string below a field is its help.
      argv: the command line without the program's name; None: that of this process.
      description: help of the program.
    """
    return options(**vars(parser_of(options, description=description).parse_args(argv)))


def parser_of(options: type, *, description: str | None = None) -> argparse.ArgumentParser:
    """The parser of the dataclass: `--peer-python` and `--peer_python` name one option."""
    parser = argparse.ArgumentParser(
        description=description or inspect.getdoc(options),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    helps = _helps(options)
    for name, (kind, field) in _fields(options).items():
        names = list(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))
        required = field.default is dataclasses.MISSING
        shown = "" if required else f" (default: {_shown(field.default)})"
        settings: dict[str, Any] = {"dest": name, "help": (helps.get(name, "") + shown)}
        settings["help"] = settings["help"].replace("%", "%%")
        settings |= {"required": True} if required else {"default": field.default}
        item, is_tuple = _item(kind)
        if item is bool:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **settings)
            continue
        if typing.get_origin(item) is Literal:
            choices = typing.get_args(item)
            settings |= {"choices": choices, "type": type(choices[0])}
        else:
            settings["type"] = item
        if is_tuple:
            parser.add_argument(*names, nargs="*", action=_Tuple, **settings)
        else:
            parser.add_argument(*names, **settings)
    return parser


def to_json(options: Any) -> str:
    """The options as one line, which `from_json` reads again."""
    return json.dumps(dataclasses.asdict(options), default=str)


def from_json(options: type[T], text: str) -> T:
    """The options that `to_json` wrote."""
    values = json.loads(text)
    for name, (kind, _) in _fields(options).items():
        item, is_tuple = _item(kind)
        if values[name] is not None and is_tuple:
            values[name] = tuple(values[name])
        elif values[name] is not None and item is Path:
            values[name] = Path(values[name])
    return options(**values)


class _Tuple(argparse.Action):
    """Stores the values of an option as a tuple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


def _fields(options: type) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(options)
    return {field.name: (hints[field.name], field) for field in dataclasses.fields(options)}


def _item(kind: Any) -> tuple[Any, bool]:
    """The type of one value of a field, and whether the field is a tuple of them."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True
    return kind, False


def _shown(default: Any) -> str:
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _helps(options: type) -> dict[str, str]:
    """The string below each field."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(before.target, ast.Name)
            assert isinstance(after.value, ast.Constant)
            found[before.target.id] = " ".join(str(after.value.value).split())
    return found
