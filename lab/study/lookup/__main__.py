"""Trains small models on facts in 1, 4, 16 or 64 wordings, or in none, and asks in 20 others.

    python -m lab.study.lookup
    python -m lab.study.lookup --runs fwpkm:64:0 attention:64:0

A run is KIND:RECIPE:SEED. Kinds differ in what reaches back beyond 30 bytes: a memory layer with
FwPKM, the same without a gate, one with SDM, full attention, or a matrix memory of 72 kB;
`pkm_above` has a slow memory (PKM) above FwPKM, too. A recipe is a number of sentences, from which
each training row draws one for its four needles, or `spans`: books of which spans of 32 to 96 bytes
are repeated, and no needle. Every training reads as many bytes. The test is 20 sentences that no
training has, one after the other in a row of each of the eight unseen books: four needles are
stated in the first half and asked for in the last one. `trained` asks in sentences of training.

`--given 102=FOLDER` asks a model that was trained elsewhere, in so many sentences of which the
first are those of a recipe: a run, or what `lab.study.real_size` left at the size of a rehearsal.

`--out` gets one line of JSON per run, sentences and way to read; runs that it has are passed over,
and an interrupted training continues. `python -m lab.pages --draw` writes them
into docs/measurements/lookup.md.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.evaluation import Subject
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.run import load_run
from fwpkm_jax.run.evaluate import subject_of
from lab.comparison.small_decoders import Lines
from lab.study.lines import train_run
from lab.study.lookup.evaluation import ask, ways_of
from lab.study.lookup.texts import HELD_OUT, LENGTH, NEEDLES, trained_sentences, write_repeated
from lab.study.real_size.checkpoint import load_checkpoint
from lab.study.real_size.sizes import model_of

Line = dict[str, Any]

BATCH = 4
SIZE = (
    *("--model.model_dim", "64", "--model.mlp_dim", "128", "--model.attention.head_dim", "16"),
    *("--optimizer.learning_rate", "3e-3"),
    # A key must reach a number that stands up to 83 bytes behind it.
    *("--model.gdn.decay_start", "time_steps"),
)
"""Half the study's width, so that a run takes a few minutes of one core."""
_MATRIX = {"num_key_heads": 8, "num_value_heads": 8, "key_head_dim": 48, "value_head_dim": 48}
"""A state of 8 x 48 x 48 float32 numbers, 73,728 bytes."""
_TABLE = (
    *("lab/study/configs.py:gdn_swa__fwpkm", "--model.fast_weight.rule.num_subkeys", "64"),
    *("--model.fast_weight.rule.value_dim", "32"),
)
_FWPKM = (*_TABLE, "--model.fast_weight.gate_bias", "2")
_PKM = ("--model.pkm.num_subkeys", "64", "--model.pkm.value_dim", "32", "--model.pkm_layers", "2")
"""A slow memory with as many slots as the fast one; it takes the place of a layer's MLP."""
_SDM = ("lab/study/configs.py:gdn_swa__sdm", *_TABLE[1:], "--model.fast_weight.gate_bias", "2")
KINDS: dict[str, tuple[str, ...]] = {
    "fwpkm": _FWPKM,
    "sdm": _SDM,  # As many slots, written by the gated delta rule.
    # A layer's MLP stands behind its fast memory, so that the PKM of the last layer is above it.
    "pkm_above": (*_FWPKM, *_PKM),
    "ungated": (
        *(*_TABLE, "--model.fast_weight.gate_output", "False"),
        *("--model.fast_weight.weight_by_gate", "False"),
    ),
    "attention": ("lab/study/configs.py:gdn_swa", "--model.mixers", "gdn", "swa", "attention"),
    "matrix": (
        *("lab/study/configs.py:gdn_swa", "--model.mixers", "gdn", "swa", "gated_deltanet"),
        *itertools.chain(*((f"--model.matrix.{x}", str(n)) for x, n in _MATRIX.items())),
    ),
}
"""Config and options of each kind."""
SPANS = "spans"
"""The recipe without sentences."""
ORDER = (
    *("fwpkm:64:0", "fwpkm:1:0", "attention:64:0", "matrix:64:0", "fwpkm:16:0", "fwpkm:spans:0"),
    *("fwpkm:4:0", "attention:1:0", "matrix:1:0", "ungated:64:0", "ungated:1:0", "ungated:16:0"),
    *("fwpkm:16:1", "fwpkm:16:2", "fwpkm:64:1", "fwpkm:64:2", "ungated:spans:0", "ungated:4:0"),
    *("attention:spans:0", "matrix:spans:0"),
    *(f"{kind}:{recipe}:0" for recipe in ("16", "4") for kind in ("attention", "matrix")),
    *("pkm_above:1:0", "pkm_above:64:0"),
    *(f"sdm:{recipe}:{seed}" for seed in range(3) for recipe in ("64", "1")),
)
"""All runs, those that say most first."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains each run and asks in sentences of training and in others."""

    runs: tuple[str, ...] = ORDER
    """As KIND:RECIPE:SEED."""
    given: tuple[str, ...] = ()
    """Models that were trained elsewhere, as NUMBER=FOLDER, with the number of sentences."""
    steps: int = 800
    """Training steps, each of 4 rows of 1,024 bytes."""
    sentences: int = 20
    """Held-out sentences that are asked, and of training's own as many, some of them repeatedly."""
    extra: tuple[str, ...] = ()
    """More options of `fwpkm train` for every run, as NAME=VALUES without dashes."""
    data: Path = Path("../shared/data/books")
    """Folder of train.jsonl and valid.jsonl."""
    runs_dir: Path = Path("runs/study/lookup")
    """Folder of the runs, and of the text with repeated spans."""
    out: Path = Path("lab/results/lookup_cpu.jsonl")
    """File of the results, which are added to."""


def train(options: Options, kind: str, recipe: str, seed: int) -> Path:
    """The directory of a run, trained as far as it was not."""
    directory = options.runs_dir / f"{kind}_{recipe}_{options.steps}_seed{seed}"
    command = [*KINDS[kind], *SIZE, "--data.length", str(LENGTH)]
    command += ["--training.batch_size", str(BATCH), "--training.memory.groups", str(BATCH)]
    command += ["--training.steps", str(options.steps), "--training.validation_batches", "0"]
    text: Path | None = options.data
    if recipe == SPANS:
        repeated, text = options.runs_dir / "spans.jsonl", None
        write_repeated(options.data / "train.jsonl", repeated, seed=0)
        command += ["--data.needles", "None", "--data.train_paths", str(repeated)]
        command += ["--data.valid_paths", str(options.data / "valid.jsonl")]
    else:
        first, *others = trained_sentences(int(recipe))
        command += ["--data.needles.num_needles", str(NEEDLES), "--data.needles.sentence", first]
        command += ["--data.needles.other_sentences", *others] if others else []
    train_run(directory, command, seed=seed, text=text, extra=options.extra)
    return directory


def given(folder: Path) -> Subject:
    """A trained run, or the weights of a rehearsal, whose memory starts as before any training.

    Raises:
      FileNotFoundError: the folder has neither.
    """
    if (folder / "checkpoints").is_dir():
        return subject_of(load_run(folder), name=str(folder))
    model = LanguageModel(model_of("fwpkm", "rehearsal"), rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    model = nnx.merge(graph, load_checkpoint(params, folder, "fwpkm"))
    return Subject(model=model, memory=model.init_memory(jax.random.key(0)))


def answers_of(subject: Subject, recipe: str, seed: int, options: Options) -> Iterator[Line]:
    """What a model answers, by sentences and way to read."""
    text = (options.data / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    books = [json.loads(book)["text"].encode() for book in text]
    asked = {"held out": HELD_OUT[: options.sentences]}
    if recipe != SPANS:
        own = itertools.cycle(trained_sentences(int(recipe))[: options.sentences])
        asked["trained"] = tuple(itertools.islice(own, options.sentences))
    weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.split(subject.model)[1]))
    for words, sentences in asked.items():
        rule = subject.model.config.fast_weight.rule
        kept = words == "held out" and isinstance(rule, FwPKM)
        ways = ways_of(subject, books=len(books), neighbours=kept)
        for name, way in ways.items():
            if words == "trained" and name not in ("written", "read"):
                continue
            answers = ask(way, books, sentences, seed=seed)
            scores = np.array(answers.scores)  # [sentences, books, scores]
            of = {"by_book": scores.mean(axis=0), "by_sentence": scores.mean(axis=1)}
            line = {"words": words, "way": name, "weights": weights, "gates": answers.gates}
            print(words, name, scores.mean(axis=(0, 1)).round(3), flush=True)
            yield line | {name: x.round(4).tolist() for name, x in of.items()}


def measure(options: Options, lines: Lines, key: Line, ready: Callable[[], Subject]) -> None:
    """Adds the lines of one model, unless the file has them.

    Args:
      options: of the program.
      lines: the file.
      key: what tells the model from others, with its recipe and seed.
      ready: gives the model, trained as far as it was not.
    """
    key = key | {"sentences": options.sentences}
    if lines.find(**key):
        return
    subject, began = ready(), time.process_time()
    found = list(answers_of(subject, key["recipe"], key["seed"], options))
    used = {"evaluation_cpu_seconds": round(time.process_time() - began)}
    for line in found:  # All of a model or none, so that an interrupted one is asked again.
        lines.add(key | line | used | {"environment": environment_once()})


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs in turn."""
    options = parse(Options, argv, description=__doc__)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    lines = Lines(options.out)
    for run in options.runs:
        kind, recipe, seed = (*run.split(":"), "", "")[:3]
        known = recipe == SPANS or recipe.isdigit()
        if kind not in KINDS or not known or not seed.isdigit():
            raise SystemExit(
                f"--runs: {run!r} is no KIND:RECIPE:SEED; kinds are {', '.join(KINDS)}, a recipe "
                f"is a number of sentences or {SPANS}."
            )
        about = {"kind": kind, "recipe": recipe, "seed": int(seed), "given": None}
        about |= {"steps": options.steps, "extra": list(options.extra)}

        def trained(kind: str = kind, recipe: str = recipe, seed: int = int(seed)) -> Subject:
            directory = train(options, kind, recipe, seed)
            return subject_of(load_run(directory), name=str(directory))

        measure(options, lines, about, trained)
    for one in options.given:
        recipe, equals, folder = one.partition("=")
        if not (equals and recipe.isdigit()):
            raise SystemExit(f"--given: {one!r} is no NUMBER=FOLDER, of sentences of training.")
        about = {"kind": "fwpkm", "recipe": recipe, "seed": 0, "given": Path(folder).name}
        measure(options, lines, about, partial(given, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
