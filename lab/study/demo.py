"""How many numbers the shipped demo's model knows after a restart.

    python -m lab.study.demo >> lab/results/demo_cpu.jsonl
    python -m lab.study.demo --told 2 >> lab/results/demo_cpu.jsonl
    python -m lab.study.demo --ship runs/demo --folder fwpkm_jax/demo

Each set has six random names and numbers, which are told in six sentences, or all in the first one,
followed by a part of a book that the model was not trained on. The memory is saved and opened
again, and each number is asked for. Prints one line of JSON for each length of the text; the
figures stand in fwpkm_jax/demo/README.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.cli import demo_command as demo
from fwpkm_jax.core.slots.options.retention import Retention
from fwpkm_jax.data import stream_documents
from fwpkm_jax.data.needles import random_name, random_value
from fwpkm_jax.interchange.imported_run import start_run
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.interchange.weights_folder import export_run, open_run
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.run import Run, load_run
from fwpkm_jax.storage.compile_cache import use_compile_cache

NUMBERS = 6
"""Of a set."""
SENTENCES = (
    *("Call {} at", "The safe of {} opens with", "My friend {} lives in house"),
    *("Whoever asks for {} should say", "Flight {} leaves from gate"),
    "The engine of {} has number",
)
"""Those of the demo's script; training had the first one alone."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tells the demo's model random numbers, lets it read on, starts it again and asks."""

    sets: int = 8
    """Sets of six numbers, drawn anew."""
    told: int = 1
    """How often each number is told."""
    read: tuple[int, ...] = (500, 1500, 3000)
    """Bytes of the book between telling and asking."""
    one_sentence: bool = False
    """All numbers of a set are told in the first sentence."""
    seed: int = 0
    """Of names and numbers, the same for each length."""
    ship: Path | None = None
    """Run of `fwpkm train demo`, from which the folder is written instead."""
    folder: Path = demo.FOLDER
    """Folder of the demo's model."""


def right_answers(run: Run, facts: dict[str, str], text: np.ndarray, *, told: int) -> int:
    """How many of the numbers are known after a restart.

    Args:
      run: the demo's model.
      facts: numbers by the words before them.
      text: tokens that are read after the numbers, perhaps none.
      told: how often the numbers are told.
    """
    sentences = "".join(demo.sentence(*fact) for fact in facts.items())
    with tempfile.TemporaryDirectory() as folder:
        with demo.conversation(run, Path(folder), write=True) as talk:
            demo.tell(talk, sentences * told, text)
            talk.save()
        with demo.conversation(run, Path(folder), write=True) as talk:
            return sum(demo.ask(talk, words) == number for words, number in facts.items())


def ship(run_dir: Path, folder: Path) -> None:
    """Writes the demo's folder from a run: its weights with still sub-keys and the write that
    keeps, which the training did without."""
    run = load_run(run_dir)
    model = run.experiment.model
    rule = model.fast_weight.rule
    assert isinstance(rule, FwPKM)
    rule = replace(rule, addressing_weight=0.0, retention=Retention(relocation=4.0))
    memory = jax.tree.map(jnp.asarray, run.memory)
    memory = {layer: rule.convert_memory(one) for layer, one in memory.items()}
    model = replace(model, fast_weight=replace(model.fast_weight, rule=rule))
    with tempfile.TemporaryDirectory() as work:
        name = run.experiment.run_dir
        experiment = replace(run.experiment, model=model, run_dir=f"{work}/run")
        start_run(experiment, Weights(run.params, memory))
        export_run(f"{work}/run", f"{work}/folder", memories="first")
        for file in ("weights.safetensors", "config.json"):
            text = (Path(work) / "folder" / file).read_bytes()
            (folder / file).write_bytes(text.replace(f"{work}/run".encode(), name.encode()))


def measure(run: Run, options: Options, length: int) -> dict[str, Any]:
    """The line of one length of the text."""
    rng, right = np.random.default_rng(options.seed), 0
    book = next(stream_documents(run.experiment.data.text, "valid")).tokens
    for number in range(options.sets):
        facts: dict[str, str] = {}
        names: list[str] = []
        while len(names) < NUMBERS:
            name = random_name(rng, 6)
            names += [name] * (name not in names)
        for sentence, name in zip(SENTENCES, names, strict=True):
            words = (SENTENCES[0] if options.one_sentence else sentence).format(name)
            facts[words] = random_value(rng, 4)
        start = number * max(options.read)
        right += right_answers(run, facts, book[start : start + length], told=options.told)
    asked = NUMBERS * options.sets
    line = {"bytes_read": length, "told": options.told, "one_sentence": options.one_sentence}
    return line | {"right": right, "asked": asked}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the line of each length."""
    options = parse(Options, argv, description=__doc__)
    use_compile_cache()
    if options.ship is not None:
        ship(options.ship, options.folder)
        return 0
    run = open_run(options.folder)
    for length in options.read:
        line = measure(run, options, length) | {"environment": environment_once()}
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
