"""`fwpkm chat RUN --memory alice`: lines in, answers out, in a terminal or a pipe.

The memory is loaded, or begun, and saved at the end. Exit codes: 0 done; 2 wrong command line, the
run was not trained on text, or the memory cannot be loaded or saved; 130 and 143 after SIGINT and
SIGTERM, with the memory saved.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from fwpkm_jax.command_line import check_options, report, separate_options
from fwpkm_jax.compile_cache import enable_compile_cache
from fwpkm_jax.generation import Sampling
from fwpkm_jax.run.chat import Chat
from fwpkm_jax.run.conversation import Conversation, memory_place
from fwpkm_jax.run.load import load_run
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Talks with a run's model; /help lists the commands of a chat."""

    run: tyro.conf.Positional[Path]
    """Run directory, as `fwpkm train` wrote it; the run was trained on text."""
    memory: str
    """Name of the memory, which is loaded, or begun, and saved at the end."""
    memories: Path | None = None
    """Folder of the memories; None: RUN/memories."""
    keep: Literal["all", "memory"] = "all"
    """What is saved. all: the conversation goes on. memory: the next one begins with empty caches
    and what the fast weights hold."""
    max_new_tokens: int = 200
    """Most tokens of an answer; it stops at an end of document."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Seed of the random draws."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""


def main(arguments: Sequence[str], program: str = "fwpkm chat") -> int:
    """Runs the chat that a command line asks for; returns the program's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    try:
        arguments = separate_options(arguments)
        check_options(arguments, ChatOptions(run=Path(), memory=""))
        options = tyro.cli(
            ChatOptions,
            args=arguments,
            prog=program,
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
        enable_compile_cache()
        run = load_run(options.run, options.step)
        with Conversation(
            run,
            **memory_place(options.run, options.memory, options.memories, run.step),
            keep=options.keep,
            sampling=options.sampling,
            seed=options.seed,
        ) as talk:
            chat = Chat(talk, max_new_tokens=options.max_new_tokens)
            chat.run()
    except (ValueError, OSError, ImportError) as error:
        return report(program, error)
    except DamagedCheckpointError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return 0 if chat.caught is None else 128 + chat.caught
