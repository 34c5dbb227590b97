"""How many numbers the shipped demo's model knows after a restart.

    python -m lab.study.demo >> lab/results/demo_cpu.jsonl
    python -m lab.study.demo --told 2 >> lab/results/demo_cpu.jsonl

Each set has six random names and numbers, which are told, followed by a part of a book that the
model was not trained on. The memory is saved and opened again, and each number is asked for.
Prints one line of JSON for each length of the text; the figures stand in README and in
fwpkm_jax/demo/README.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.cli import demo_command as demo
from fwpkm_jax.data import stream_documents
from fwpkm_jax.data.needles import random_name, random_value
from fwpkm_jax.interchange.weights_folder import open_run
from fwpkm_jax.run import Run
from fwpkm_jax.storage.compile_cache import use_compile_cache

NUMBERS = 6
"""Of a set."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tells the demo's model random numbers, lets it read on, starts it again and asks."""

    sets: int = 8
    """Sets of six numbers, drawn anew."""
    told: int = 1
    """How often each number is told."""
    read: tuple[int, ...] = (500, 1500, 3000)
    """Bytes of the book between telling and asking."""
    seed: int = 0
    """Of names and numbers, the same for each length."""


def right_answers(run: Run, facts: dict[str, str], text: np.ndarray, *, told: int) -> int:
    """How many of the numbers are known after a restart.

    Args:
      run: the demo's model.
      facts: numbers by name.
      text: tokens that are read after the numbers, perhaps none.
      told: how often the numbers are told.
    """
    sentences = "".join(demo.sentence(*fact) for fact in facts.items())
    with tempfile.TemporaryDirectory() as folder:
        with demo.conversation(run, Path(folder), write=True) as talk:
            demo.tell(talk, sentences * told, text)
            talk.save()
        with demo.conversation(run, Path(folder), write=True) as talk:
            return sum(demo.ask(talk, name) == number for name, number in facts.items())


def measure(run: Run, options: Options, length: int) -> dict[str, Any]:
    """The line of one length of the text."""
    rng, right = np.random.default_rng(options.seed), 0
    book = next(stream_documents(run.experiment.data.text, "valid")).tokens
    for number in range(options.sets):
        facts: dict[str, str] = {}
        while len(facts) < NUMBERS:
            facts[random_name(rng, 6)] = random_value(rng, 4)
        start = number * max(options.read)
        right += right_answers(run, facts, book[start : start + length], told=options.told)
    asked = NUMBERS * options.sets
    return {"bytes_read": length, "told": options.told, "right": right, "asked": asked}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the line of each length."""
    options = parse(Options, argv, description=__doc__)
    use_compile_cache()
    run = open_run(demo.FOLDER)
    for length in options.read:
        line = measure(run, options, length) | {"environment": environment_once()}
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
