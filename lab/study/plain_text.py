"""Trains the study's backbone, with and without FwPKM, on books; reads unseen books twice.

    python -m lab.study.plain_text --rates 1e-3 2e-3 4e-3 --seeds 0 --steps 400
    python -m lab.study.plain_text --steps 2000

Does a memory with the paper's gate lower the loss of text in which no needles are hidden, and
where in a text? Every kind trains on the same rows. Then each reads the beginning of every unseen
book, and the same beginning again, with the memory written and with it frozen. Each book starts
from the memory that training left. `--out` gets one JSON object per line and run; runs that it has
are passed over, and an interrupted run continues. The page of results is
docs/measurements/text.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.evaluation import EVALS, PerplexityConfig
from fwpkm_jax.evaluation.intervals import clustered_mean
from fwpkm_jax.evaluation.sources import text_sources
from fwpkm_jax.run import load_run
from fwpkm_jax.run.evaluate import subject_of
from lab.comparison.small_decoders import Lines, Row
from lab.study.lines import train_run, trained_loss
from lab.study.tables import over_seeds

KINDS = {
    "backbone": "lab/study/configs.py:gdn_swa",
    "fwpkm": "lab/study/configs.py:gdn_swa__fwpkm",
    "pkm_fwpkm": "lab/study/configs.py:gdn_swa__pkm_fwpkm",
}
"""Config of each kind."""
WAYS = ("writing", "frozen")
READINGS = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates each kind with each rate and seed."""

    kinds: tuple[str, ...] = ("backbone", "fwpkm")
    """backbone, fwpkm, pkm_fwpkm (a product-key memory in an earlier layer too)."""
    rates: tuple[float, ...] = (2e-3,)
    """Peak learning rates."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and rows."""
    steps: int = 2000
    """Steps of each run, of 8 rows of 512 bytes."""
    characters: int = 24_000
    """Beginning of each unseen book that is read."""
    ends: tuple[int, ...] = (512, 2048, 8192, 24_000)
    """Ends of the sections of a beginning for which losses are stored, in bytes."""
    extra: tuple[str, ...] = ()
    """More options of `fwpkm train` for every run, as NAME=VALUES without dashes."""
    data: Path = Path("../shared/data/books")
    """Folder of train.jsonl and valid.jsonl."""
    runs_dir: Path = Path("runs/study/plain_text")
    """Folder of the runs and of the text that is read twice."""
    out: Path = Path("lab/results/plain_text_cpu.jsonl")
    """File of the results, which are added to."""


def write_beginnings(options: Options) -> Path:
    """Writes the beginning of each unseen book twice in a row."""
    path = options.runs_dir / f"twice_{options.characters}.jsonl"
    if not path.exists():
        books = (options.data / "valid.jsonl").read_text(encoding="utf-8").splitlines()
        begins = [
            (book["id"], book["text"][: options.characters]) for book in map(json.loads, books)
        ]
        lines = [json.dumps({"id": name, "text": 2 * text}) + "\n" for name, text in begins]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
    return path


def train(options: Options, kind: str, rate: float, seed: int) -> Path:
    """The directory of a run, trained as far as it was not."""
    name = f"{kind}_{rate}_{options.steps}_seed{seed}"
    if options.extra:
        name += "_" + hashlib.sha256(" ".join(options.extra).encode()).hexdigest()[:8]
    directory = options.runs_dir / name
    command = [KINDS[kind], "--data.needles", "None", "--training.steps", str(options.steps)]
    command += ["--optimizer.learning_rate", str(rate), "--training.validation_batches", "0"]
    train_run(directory, command, seed=seed, text=options.data, extra=options.extra)
    return directory


def sections(
    loss: np.ndarray, document: np.ndarray, ends: Sequence[int], *, half: np.ndarray
) -> list[list[float | None]]:
    """Mean loss by section and document.

    Args:
      loss: of every label in reading order, nats.
      document: the number of its document.
      ends: of the sections, in labels from the start of a reading.
      half: labels of the first reading of each document; what follows is the second.

    Returns:
      For each section of the first reading, then of the second, the mean of each document; None
      where a document is shorter.
    """
    found: list[list[float | None]] = []
    for reading in range(len(READINGS)):
        for above, end in itertools.pairwise((0, *ends)):
            means: list[float | None] = []
            for number, first in enumerate(half):
                own = loss[document == number]
                own = own[first:] if reading else own[:first]
                part = own[above:end]
                means.append(round(float(part.mean()), 5) if len(part) else None)
            found.append(means)
    return found


def evaluate(options: Options, directory: Path, text: Path) -> Row:
    """Losses of the unseen books by section, reading and way."""
    run = load_run(directory)
    subject = replace(subject_of(run, name=str(directory)), text_paths=(str(text),))
    config = PerplexityConfig(
        write="both" if run.memory else "off",
        segment_length=subject.text.length,
        memory_reset="document",
    )
    result = EVALS["ppl"].of_model(
        subject.model,
        subject.memory,
        config=config,
        sources=text_sources(subject.text),
    )
    document = result.arrays["document"]
    # The first byte of a document is no label, and behind its last one may be an end mark.
    half = np.bincount(document) // 2
    return {
        way: sections(result.arrays[f"loss_{way}"], document, options.ends, half=half)
        for way in WAYS
        if f"loss_{way}" in result.arrays
    } | {"gate_mean": result.record["results"].get("writing", {}).get("gate_mean")}


def measure(options: Options, kind: str, rate: float, seed: int, lines: Lines) -> None:
    """Makes one run, unless the file has it."""
    key = {"kind": kind, "rate": rate, "seed": seed, "steps": options.steps}
    key |= {"ends": list(options.ends), "characters": options.characters}
    key |= {"extra": list(options.extra)}
    if lines.find(**key):
        return
    directory = train(options, kind, rate, seed)
    row = key | {"train_loss": round(trained_loss(directory), 5)}
    lines.add(row | evaluate(options, directory, write_beginnings(options)) | environment_once())


def table(rows: Sequence[Row]) -> str:
    """Loss of each run in nats: the last tenth of training, then by way, reading and section."""
    if not rows:
        return ""
    ends = rows[0]["ends"]
    names = [f"{reading}, to {end}" for reading in READINGS for end in ends]
    found = [["model", "steps", "rate", "seed", "training's end", *names]]
    found.append(["---"] * len(found[0]))
    for row in rows:
        for way in WAYS:
            if way not in row or row["ends"] != ends:
                continue
            name = " ".join([row["kind"], *row["extra"]])
            name += "" if row["kind"] == "backbone" else f", {way}"
            about = [name, str(row["steps"]), f"{row['rate']:g}", str(row["seed"])]
            means = [f"{_mean(one):.3f}" for one in row[way]]
            found.append([*about, f"{row['train_loss']:.3f}", *means])
    return _lines(found)


def rates_table(rows: Sequence[Row]) -> str:
    """Loss of the last tenth of training by kind, of the first seed, by rate."""
    first = [row for row in rows if row["seed"] == min(one["seed"] for one in rows)]
    rates = sorted({row["rate"] for row in first})
    found = [["loss in nats", *(f"rate {rate:g}" for rate in rates)]]
    found.append(["---"] * len(found[0]))
    for kind in dict.fromkeys(row["kind"] for row in first):
        losses = {row["rate"]: row["train_loss"] for row in first if row["kind"] == kind}
        found.append([kind, *(f"{losses[x]:.3f}" if x in losses else "" for x in rates)])
    return _lines(found)


def differences(rows: Sequence[Row]) -> str:
    """FwPKM minus backbone, and with an option minus without, by section.

    Intervals are over books. Of the same steps, rate and seed; the first also of the same
    `extra`, the last with the last option of `extra` and without it. The mean of several seeds has
    an interval over these.
    """
    keys = ("steps", "rate", "seed", "ends", "characters", "extra")
    by_key = {(row["kind"], *(str(row[key]) for key in keys)): row for row in rows}
    found: list[list[str]] = []
    means: dict[tuple[str, ...], list[list[float]]] = {}
    for (kind, *key), row in by_key.items():
        pairs = dict[str, tuple[Any, Any]]()
        other = by_key.get(("backbone", *key))
        if kind == "fwpkm" and other is not None:
            pairs["written minus backbone"] = (row["writing"], other["frozen"])
            pairs["frozen minus backbone"] = (row["frozen"], other["frozen"])
            pairs["written minus frozen"] = (row["writing"], row["frozen"])
        *others, last = row["extra"] or [""]
        beside = f", beside {', '.join(others)}" if others else ""
        about = f" ({last}{beside})" if last else ""
        plain = by_key.get((kind, *key[:-1], str(row["extra"][:-1])))
        if row["extra"] and plain is not None:
            way = "writing" if "writing" in row else "frozen"
            pairs[f"{kind}, with it minus without"] = (row[way], plain[way])
        for name, (one, two) in pairs.items():
            by_book = [_paired(*pair) for pair in zip(one, two, strict=True)]
            found.append([name + about, *key[:3], *map(_interval, by_book)])
            of_seed = [float(np.mean(x)) if len(x) else math.nan for x in by_book]
            means.setdefault((name + about, *key[:2]), []).append(of_seed)
    for about, seeds in means.items():
        if len(seeds) > 1:
            over = [over_seeds(of_section, digits=4) for of_section in zip(*seeds, strict=True)]
            found.append([*about, f"mean of {len(seeds)}", *over])
    if not found:
        return ""
    abouts = list(means)
    found.sort(key=lambda row: (abouts.index(tuple(row[:3])), row[3]))  # By difference, then seed.
    names = [f"{reading}, to {end}" for reading in READINGS for end in rows[0]["ends"]]
    head = ["nats", "steps", "rate", "seed", *names]
    return _lines([head, ["---"] * len(head), *found])


def _paired(one: Sequence[float | None], two: Sequence[float | None]) -> np.ndarray:
    pairs = zip(one, two, strict=True)
    return np.asarray([x - y for x, y in pairs if x is not None and y is not None])


def _interval(values: np.ndarray) -> str:
    if not len(values):
        return ""
    mean, interval = clustered_mean(values, np.ones(len(values)))
    return f"{mean:+.4f}" + ("" if interval is None else " [{:+.4f}, {:+.4f}]".format(*interval))


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    lines = Lines(options.out)
    for seed, rate, kind in itertools.product(options.seeds, options.rates, options.kinds):
        if kind not in KINDS:
            raise SystemExit(f"--kinds: {kind} is none of {tuple(KINDS)}.")
        measure(options, kind, rate, seed, lines)
    print(table(lines.rows))
    print()
    print(differences(lines.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
