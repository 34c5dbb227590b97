"""A command line as an instance of a dataclass; tyro reads it and says what is wrong with it."""

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

FieldRule = Callable[[StructTypeInfo, StructFieldSpec], StructFieldSpec | None]
"""Changes how a field of a section becomes an option; None: it becomes none and has its default."""


def read_options(
    cls: Any,
    arguments: Sequence[str],
    *,
    program: str,
    field_rule: FieldRule = lambda info, field: field,
    value_rule: Callable[[PrimitiveTypeInfo], PrimitiveConstructorSpec | None] | None = None,
    **settings: Any,
) -> Any:
    """What `tyro.cli` makes of a command line.

    Args:
      cls: a dataclass, or a union of those of subcommands.
      arguments: its command line, without the program's name.
      program: what help and messages call the program.
      field_rule: changes fields of `cls` and its sections.
      value_rule: says how a further type of values is read.
      **settings: of `tyro.cli`.

    Raises:
      SystemExit: 0 after `--help`; 2 if an option is unknown, a value is of a wrong type or
        refused, or something is missing, which is printed.
    """
    registry = ConstructorRegistry()
    if value_rule is not None:
        registry.primitive_rule(value_rule)
    inside: set[Any] = set()

    @registry.struct_rule
    def section(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not dataclasses.is_dataclass(info.type) or info.type in inside:
            return None
        inside.add(info.type)  # The rule for dataclasses applies then, which is tyro's own.
        try:
            found = ConstructorRegistry.get_struct_spec(info)
        finally:
            inside.remove(info.type)
        if not isinstance(found, StructConstructorSpec):
            return None
        fields = [field_rule(info, _with_one_line(field)) for field in found.fields]
        if None in fields:
            default = functools.partial(dataclasses.replace, info.default)
            found = dataclasses.replace(found, instantiate=default)
        return dataclasses.replace(found, fields=tuple(filter(None, fields)))

    told = settings.pop("description", None) or (isinstance(cls, type) and inspect.getdoc(cls))
    if told:
        settings["description"] = wrapped(told)
    return tyro.cli(
        cls,
        args=list(arguments),
        prog=program,
        use_underscores=True,
        registry=registry,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
        **settings,
    )


def wrapped(text: str) -> str:
    """A description in lines for a terminal.

    tyro breaks none, and joins lines that begin with a letter, so further ones are indented.
    """
    paragraphs = (" ".join(one.split()) for one in inspect.cleandoc(text).split("\n\n"))
    return "\n\n".join(textwrap.fill(one, 80, subsequent_indent="  ") for one in paragraphs)


def _with_one_line(field: StructFieldSpec) -> StructFieldSpec:
    """The field with its docstring as one line, which tyro breaks to fit the terminal."""
    text: Any = field.helptext  # A text, or a function that finds it in the source.

    def joined() -> str | None:
        found = text() if callable(text) else text
        return None if found is None else " ".join(str(found).split())

    return dataclasses.replace(field, helptext=joined)
