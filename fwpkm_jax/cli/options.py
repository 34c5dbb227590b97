"""A command line as an instance of its command's options."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fwpkm_jax.io.atomic import check_local
from fwpkm_jax.io.options import read_options
from fwpkm_jax.plugins import import_plugins
from fwpkm_jax.run.load import WhichWeights

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


def parse_options(
    cls: Any, arguments: Sequence[str], program: str, *, addresses: Sequence[str] = ()
) -> Any:
    """The options that a command line sets.

    Args:
      cls: the command's options, or a union of those of its subcommands.
      program: what messages and the help call the command.
      addresses: names of options that may be addresses of buckets.

    Raises:
      SystemExit: see `read_options`.
      ValueError: options do not go together, a path is an address, or a plugin is not installed.
    """
    options = read_options(cls, arguments, program=program)
    for name, path in _paths(options):
        if name not in addresses:
            check_local(path, name)
    if isinstance(options, PluginOptions):
        import_plugins(options.plugins)
    return options


def before_others(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options that decide which others there are, and the arguments without them.

    The modules of `--plugins` are imported, as they may register mixers or evaluations.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, usage="fwpkm COMMAND --help"
    )
    parser.add_argument("--plugins", nargs="*", default=())
    parser.add_argument("--resume", metavar="RUN")
    parser.add_argument("--base", metavar="RUN")
    parser.add_argument("--add_memory", "--add-memory", action="store_true")
    found, others = parser.parse_known_args(arguments)
    import_plugins(found.plugins)
    return found, others


def _paths(options: Any, prefix: str = "") -> Iterator[tuple[str, Path]]:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, f"{prefix}{field.name}.")
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                yield f"{prefix}{field.name}", path
