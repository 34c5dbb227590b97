"""A command line as an instance of its command's options."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from fwpkm_jax.command_line import check_options, separate_options
from fwpkm_jax.plugins import import_plugins
from fwpkm_jax.run.load import WhichWeights
from fwpkm_jax.typed_options import read_options
from fwpkm_jax.whole_files import check_local

RunArgument = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
FolderArgument = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
"""Arguments without a name, as help and messages call them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """Of any command that opens a run."""

    plugins: tuple[str, ...] = ()
    """Modules outside this package that the run uses. They are imported, which runs them; a run's
    file alone imports none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions(PluginOptions):
    """Of any command that opens one checkpoint of a run."""

    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""
    weights: WhichWeights = "trained"
    """Slow weights of the checkpoint. trained: those after its step. ema: their moving average, of
    a run with optimizer.ema."""


Options = TypeVar("Options")


def parse_options(
    arguments: Sequence[str], program: str, empty: Options, *, addresses: Sequence[str] = ()
) -> Options:
    """The options that a command line sets.

    Args:
      arguments: the command line.
      program: what messages and the help call the command.
      empty: options of the same class, whose values are not used.
      addresses: names of options that may be addresses of buckets.

    Raises:
      SystemExit: 0 after `--help`.
      ValueError: an option does not exist (the nearest name is given), something is missing, a
        value is of a wrong type or refused, a path is an address, or a plugin is not installed.
    """
    arguments = separate_options(arguments)
    check_options(arguments, empty)
    options = read_options(
        type(empty),
        arguments,
        program=program,
        like=empty,
        config=(tyro.conf.FlagConversionOff,),
    )
    for name, path in _paths(options):
        if name not in addresses:
            check_local(path, name)
    if isinstance(empty, PluginOptions):
        import_plugins(options.plugins)
    return options


def values_of(option: str, arguments: Sequence[str]) -> list[str]:
    """The values of an option that takes several, from `separate_options`."""
    if option not in arguments:
        return []
    values = arguments[arguments.index(option) + 1 :]
    return list(itertools.takewhile(lambda value: not value.startswith("-"), values))


def _paths(options: Any, prefix: str = "") -> Iterator[tuple[str, Path]]:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, f"{prefix}{field.name}.")
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                yield f"{prefix}{field.name}", path
