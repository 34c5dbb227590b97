"""`fwpkm generate RUN --prompt TEXT [--seed 1] [--memory alice]`.

Prints the prompt and the generated text. Exit codes: 0 done; 2 wrong command line, the run was not
trained on text, or the memory cannot be loaded or saved.
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
from fwpkm_jax.run.chat import read_text
from fwpkm_jax.run.continue_text import answered
from fwpkm_jax.run.conversation import Conversation, memory_place
from fwpkm_jax.run.load import load_run
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continues a text with a run's model."""

    run: tyro.conf.Positional[Path]
    """Run directory, as `fwpkm train` wrote it; the run was trained on text."""
    prompt: str = "The "
    """Text to continue; the model reads it first."""
    read: Path | None = None
    """A text file that is read before the prompt and not printed."""
    memory: str | None = None
    """Name of a memory: it is loaded, or begun, and saved after the answer. None: nothing is
    kept."""
    memories: Path | None = None
    """Folder of the memories; None: RUN/memories."""
    keep: Literal["all", "memory"] = "all"
    """What is saved. all: the conversation goes on. memory: the next one begins with empty caches
    and what the fast weights hold."""
    max_new_tokens: int = 200
    """Most tokens to generate; generation stops at an end of document."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Seed of the random draws."""
    write: bool = True
    """Write prompt and answer into the memory. Off: it stays as the checkpoint has it."""
    chat: bool = False
    """The prompt is a message: the chat template of an imported model's tokenizer puts it into the
    form that the model was trained on, and only the answer is printed."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""


def main(arguments: Sequence[str], program: str = "fwpkm generate") -> int:
    """Prints the text that a command line asks for; returns the program's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    try:
        arguments = separate_options(arguments)
        check_options(arguments, GenerateOptions(run=Path()))
        options = tyro.cli(
            GenerateOptions,
            args=arguments,
            prog=program,
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
        enable_compile_cache()
        read = "" if options.read is None else read_text(options.read)
        run = load_run(options.run, options.step)
        with Conversation(
            run,
            **memory_place(options.run, options.memory, options.memories, run.step),
            keep=options.keep,
            sampling=options.sampling,
            seed=options.seed,
            write=options.write,
        ) as talk:
            text = answered(
                talk,
                options.prompt,
                max_new_tokens=options.max_new_tokens,
                chat=options.chat,
                read=read,
            )
            talk.save()
    except (ValueError, OSError, ImportError) as error:
        return report(program, error)
    except DamagedCheckpointError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0
