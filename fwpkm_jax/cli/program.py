"""Runs the subcommands of `fwpkm`; only the chosen subcommand's module is imported."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from fwpkm_jax.io.terminal import (
    INTERRUPTED,
    escape_what_is_lacking,
    interruptible,
    leave_out_abandoned_writes,
    report,
    say_error,
    start_logging,
)
from fwpkm_jax.literals import nearest

COMMANDS = {
    "demo": "Tells a small trained model facts, quits, starts again and asks.",
    "train": "Trains a model: a shipped config's name or your own config file.",
    "configs": "Lists the shipped configs.",
    "eval": "Evaluates a run: tables, plots and a report.",
    "generate": "Continues a text with a run's model.",
    "chat": "Talks with a run's model, whose memory lasts.",
    "memories": "Lists, describes and deletes a run's memories.",
    "audit": "Checks what a run's recall rests on: a page and a bundle.",
    "report": "Writes a run's report again from its stored results.",
    "import": "Starts a run from exported, released or Hugging Face weights.",
    "export": "Writes a run's weights into a folder for use elsewhere.",
}
"""Subcommands and what they do; `fwpkm_jax/cli/NAME_command.py` defines the `main` of each."""

_USAGE = """usage: fwpkm COMMAND ...

Fast-weight memories for language models in JAX.

{commands}

fwpkm COMMAND --help shows a command's options. Start with:

  fwpkm demo
  fwpkm train recall && fwpkm eval runs/recall
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand that the command line names.

    Args:
      arguments: the command line without the program's name; None: that of this process.

    Returns:
      The exit code: 0 done; 1 failed; 2 wrong command line, configuration or run; 130 and 143
      after a signal.
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if name == "--version":
        return _print_version()
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS)
        print(f"fwpkm: {name!r} is none of {', '.join(COMMANDS)}{hint}.", file=sys.stderr)
        return 2
    return run(name, rest, program=f"fwpkm {name}")


def run(name: str, arguments: Sequence[str], *, program: str) -> int:
    """Runs a subcommand, whose failures end in one line.

    Returns:
      The exit code, as `main`.
    """
    if "--version" in arguments:
        return _print_version()
    start_logging()
    escape_what_is_lacking()
    leave_out_abandoned_writes()
    try:
        with interruptible(program):
            command = importlib.import_module(f"fwpkm_jax.cli.{name}_command")
        return command.main(arguments, program=program)
    except KeyboardInterrupt:
        say_error(program, INTERRUPTED)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # Whoever read the output has gone: `fwpkm memories RUN | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except SystemExit as stop:  # After --help, and a command line that cannot be read.
        return int(stop.code or 0)
    except Exception as error:
        return report(program, error)


def _print_version() -> int:
    from fwpkm_jax import __version__

    print(__version__)
    return 0


def usage() -> str:
    """The text that `fwpkm --help` prints."""
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {about}" for name, about in COMMANDS.items())
    return _USAGE.format(commands="\n".join(lines))
