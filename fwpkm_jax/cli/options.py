"""A command line as an instance of its command's options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro

from fwpkm_jax.command_line import check_options, separate_options

Options = TypeVar("Options")


def parse_options(arguments: Sequence[str], program: str, empty: Options) -> Options:
    """The options that a command line sets.

    Args:
      arguments: the command line.
      program: what messages and the help call the command.
      empty: options of the same class, whose values are not used.

    Raises:
      SystemExit: 0 after `--help`; 2, with a message, for a wrong type or a refused value.
      ValueError: an option does not exist; the nearest name is given.
    """
    arguments = separate_options(arguments)
    check_options(arguments, empty)
    return tyro.cli(
        type(empty),
        args=arguments,
        prog=program,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
    )
