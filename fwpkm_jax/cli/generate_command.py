"""`fwpkm generate RUN --prompt TEXT [--seed 1]`.

Prints the prompt and the generated text. Exit codes: 0 done; 2 wrong command line, or the run was
not trained on text.
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
from fwpkm_jax.run.continue_text import continue_text
from fwpkm_jax.run.load import load_run
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continues a text with a run's model."""

    run: tyro.conf.Positional[Path]
    """Run directory, as `fwpkm train` wrote it; the run was trained on text."""
    prompt: str = "The "
    """Text to continue; the model reads it first."""
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
        text = continue_text(
            load_run(options.run, options.step),
            options.prompt,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            seed=options.seed,
            write=options.write,
            chat=options.chat,
        )
    except (ValueError, FileNotFoundError, ImportError) as error:
        return report(program, error)
    except DamagedCheckpointError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0
