"""Continues a text with a run's model: `python generate.py RUN --prompt TEXT [--seed 1]`.

Prints the prompt and what follows. Exit codes: 0 done; 2 wrong command line, or the run cannot
continue a text.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import tyro

from fwpkm_jax.command_line import check_options, report, separate_options
from fwpkm_jax.generation import Sampling, generate, init_generation
from fwpkm_jax.run import load_run, text_tokenizer
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continues a text with a run's model."""

    run: tyro.conf.Positional[Path]
    """Run directory, as train.py wrote it; of a run on text."""
    prompt: str = "The "
    """Text to continue; read into the memory first."""
    max_new_tokens: int = 200
    """Tokens generated, fewer where the document ends."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Of the draws."""
    write: bool = True
    """Write prompt and answer into the memory. Off: it stays as the checkpoint has it."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""


def continue_text(options: GenerateOptions) -> str:
    """The prompt and what follows.

    Raises:
      ValueError: the run is not one on text, or the prompt is empty.
      FileNotFoundError: there is no such run or checkpoint.
    """
    run = load_run(options.run, options.step)
    tokenizer = text_tokenizer(run)
    prompt = tokenizer.encode(options.prompt)
    # The embedding may have more rows than the tokenizer has ids.
    vocab_size = options.sampling.vocab_size or tokenizer.vocab_size
    memory = jax.tree.map(lambda x: x[:1], run.memory)  # One sequence takes the first of several.
    state = init_generation(
        run.model, memory, batch=1, max_length=len(prompt) + options.max_new_tokens
    )
    out = generate(
        run.model,
        [prompt],
        state,
        max_new_tokens=options.max_new_tokens,
        sampling=dataclasses.replace(options.sampling, vocab_size=vocab_size),
        rng=jax.random.key(options.seed),
        stop_ids=[tokenizer.eos_id],
        write=options.write,
    )
    new = np.asarray(out.tokens[0, : int(out.lengths[0])])
    return tokenizer.decode(np.concatenate([prompt, new]))


def main(arguments: list[str]) -> int:
    """Generates as the command line asks; the program's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    try:
        arguments = separate_options(arguments)
        check_options(arguments, GenerateOptions(run=Path()))
        options = tyro.cli(
            GenerateOptions,
            args=arguments,
            prog="generate.py",
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
        print(continue_text(options))
    except (ValueError, FileNotFoundError) as error:
        return report("generate.py", error)
    except DamagedCheckpointError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
