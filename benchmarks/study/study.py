"""Trains and evaluates the models of configs/study/, and prints their tables.

The page of results is docs/measurements/study.md.

    python -m benchmarks.study.study                          every run, one after another
    python -m benchmarks.study.study --runs gdn_swa__fwpkm:0  some of them, as NAME:SEED
    python -m benchmarks.study.study --tables                 the tables of finished runs

Finished parts are skipped; an interrupted training run continues. Results go to
`runs/study/NAME_seedS/study/EVALUATION/`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import parse
from fwpkm_jax.evaluation import NeedleConfig, PerplexityConfig, Subject, run_suite
from fwpkm_jax.evaluation.continual.evaluate import ContinualConfig
from fwpkm_jax.evaluation.intervals import clustered_mean, student_t
from fwpkm_jax.evaluation.reconfigure import reconfigure
from fwpkm_jax.run import load_run
from fwpkm_jax.run.evaluate import subject_of

RUNS_DIR = Path("runs/study")
DATA = Path("../shared/data")
EXCERPTS = RUNS_DIR / "books_excerpts.jsonl"
EXCERPT_CHARACTERS = 12_500

MAIN = "gdn_swa__fwpkm"
SEEDS = {
    MAIN: (0, 1, 2),
    "gdn_swa": (0, 1, 2),
    "gdn_swa__pkm": (0,),
    "gdn_swa__pkm_fwpkm": (0,),
    "gdn_swa__fwmlp": (0,),
    "lact": (0,),
    "fa": (0,),
    "fa__fwpkm": (0,),
    "fa__fwpkm__pswa": (0,),
}
"""Configs and their seeds, in the order of the runs."""

DOMAINS = ("math", "law", "philosophy", "biomed", "irc", "patents")
HAYSTACKS = {"needle_1x": 56, "needle_8x": 700, "needle_15x": 1400}
"""Words per haystack by result; 56 words and five needles are about one training row."""
WINDOWED = "needle_window"
"""Needles at the shortest length for the pSWA model, with attention limited to its window."""


def evaluations(name: str, *, has_memory: bool) -> dict[str, tuple[str, Any]]:
    """Evaluation and options by the name of the result."""
    domains = tuple(f"{domain}={DATA / 'domains' / domain}" for domain in DOMAINS)
    return {
        "ppl": (
            "ppl",
            PerplexityConfig(data=(str(EXCERPTS),), write="both" if has_memory else "on"),
        ),
        **{
            label: ("needle", options)
            for label, options in _needles(name, has_memory=has_memory).items()
        },
        "continual": (
            "continual",
            ContinualConfig(domains=domains, max_batches=16, max_eval_batches=4),
        ),
    }


def _needles(name: str, *, has_memory: bool) -> dict[str, NeedleConfig]:
    """Needle evaluations; the main model answers more needles."""
    short, long, longest = HAYSTACKS.values()
    if name == MAIN:
        every, ends = (1, 2, 3, 4), (1, 4)
        return {
            "needle_1x": NeedleConfig(haystack_words=(short,), samples=100, readings=every),
            "needle_8x": NeedleConfig(haystack_words=(long,), samples=120, readings=every),
            "needle_15x": NeedleConfig(haystack_words=(longest,), samples=40, readings=ends),
            "needle_frozen": _frozen_needles(samples=50),
            "needle_reference": NeedleConfig(
                haystack_words=(short, long), samples=100, readings=ends, mode="reference"
            ),
        }
    # A model without a memory keeps no information from one reading to the next.
    readings = (1, 4) if has_memory else (1,)
    chosen = {
        "needle_1x": NeedleConfig(haystack_words=(short,), samples=50, readings=readings),
        "needle_8x": NeedleConfig(haystack_words=(long,), samples=20, readings=readings),
    }
    if has_memory:
        chosen["needle_frozen"] = _frozen_needles(samples=25)
    if name == "fa__fwpkm__pswa":
        chosen[WINDOWED] = chosen["needle_1x"]
    return chosen


def _frozen_needles(*, samples: int) -> NeedleConfig:
    words = (HAYSTACKS["needle_1x"], HAYSTACKS["needle_8x"])
    return NeedleConfig(haystack_words=words, samples=samples, readings=(1,), write=False)


def write_excerpts() -> None:
    """Writes the beginning of each of the eight unseen books, which give an interval over books."""
    books = (DATA / "books" / "valid.jsonl").read_text().splitlines()
    lines = [
        json.dumps({"id": book["id"], "text": book["text"][:EXCERPT_CHARACTERS]})
        for book in map(json.loads, books)
    ]
    EXCERPTS.parent.mkdir(parents=True, exist_ok=True)
    EXCERPTS.write_text("\n".join(lines) + "\n")


def make_run(name: str, seed: int) -> None:
    """Trains and evaluates one run, except for parts that are finished."""
    directory = run_directory(name, seed)
    if not (directory / "results.json").exists():
        options = ["--seed", str(seed), "--run_dir", str(directory)]
        for split in ("train", "valid"):
            options += [f"--data.{split}_paths", str(DATA / "books" / f"{split}.jsonl")]
        command = [sys.executable, "-m", "fwpkm_jax", "train", f"study/{name}", *options]
        subprocess.run(command, check=True)
    run = load_run(directory)
    subject = subject_of(run, name=str(directory))
    chosen = evaluations(name, has_memory=bool(run.memory))
    for label, (evaluation, options) in chosen.items():
        results = directory / "study" / label
        if (results / f"{evaluation}.json").exists():
            continue
        began = time.monotonic()
        one = _limited(subject) if label == WINDOWED else subject
        run_suite(one, (evaluation,), directory=results, configs={evaluation: options})
        print(f"{directory} {label}: {time.monotonic() - began:.0f} s", flush=True)


def _limited(subject: Subject) -> Subject:
    """The subject with sliding windows in place of full attention, which has the same weights."""
    config = subject.model.config
    mixers = tuple("swa" if mixer == "attention" else mixer for mixer in config.mixers)
    model = reconfigure(subject.model, replace(config, mixers=mixers))
    return replace(subject, model=model)


def run_directory(name: str, seed: int) -> Path:
    return RUNS_DIR / f"{name}_seed{seed}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates the study's runs."""

    runs: tuple[str, ...] = tuple(f"{name}:{seed}" for name, of in SEEDS.items() for seed in of)
    """As NAME:SEED."""
    tables: bool = False
    """Only prints the tables of finished runs."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    unknown = set(options.runs) - set(Options.runs)
    if unknown:
        raise SystemExit(f"--runs: no such run: {sorted(unknown)}; there are {Options.runs}.")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    if not options.tables:
        if not EXCERPTS.exists():
            write_excerpts()
        for one in options.runs:
            name, seed = one.split(":")
            make_run(name, int(seed))
    print("\n\n".join(tables()))
    return 0


def tables() -> list[str]:
    """Markdown tables of the finished runs."""
    return [_perplexity_table(), _needle_table(), _reference_table(), _continual_table()]


def _finished(label: str, evaluation: str) -> list[tuple[str, int, dict[str, Any], Path]]:
    """Name, seed, record and directory of every run that has a result."""
    found = []
    for name, seeds in SEEDS.items():
        for seed in seeds:
            directory = run_directory(name, seed) / "study" / label
            path = directory / f"{evaluation}.json"
            if path.exists():
                found.append((name, seed, json.loads(path.read_text()), directory))
    return found


def _perplexity_table() -> str:
    lines = [
        "| model | seed | written | frozen | difference, nats | over books |",
        "|---|---|---|---|---|---|",
    ]
    perplexities: dict[str, list[float]] = {}
    changes: dict[str, list[float]] = {}
    for name, seed, record, directory in _finished("ppl", "ppl"):
        results = record["results"]
        perplexities.setdefault(name, []).append(results["writing"]["all"]["perplexity"])
        written = f"{perplexities[name][-1]:.3f}"
        frozen = segments = books = ""
        if "difference" in results:
            frozen = f"{results['frozen']['all']['perplexity']:.3f}"
            difference = results["difference"]["all"]
            changes.setdefault(name, []).append(difference["loss"])
            segments = _interval(difference["loss"], difference["interval"])
            books = _interval(*_over_books(directory / "ppl.npz"))
        lines.append(f"| {name} | {seed} | {written} | {frozen} | {segments} | {books} |")
    for name, values in perplexities.items():
        if len(values) > 1:
            written = _over_seeds(values, digits=3)
            over = f"{_over_seeds(changes[name], digits=4)} (over seeds)" if name in changes else ""
            lines.append(f"| {name} | mean of {len(values)} | {written} | | {over} | |")
    return "\n".join(lines)


def _over_books(path: Path) -> tuple[float, Any]:
    """Mean difference of the losses, written minus frozen, with an interval over documents."""
    with np.load(path) as arrays:
        difference = arrays["loss_writing"].astype(np.float64) - arrays["loss_frozen"]
        sums = np.bincount(arrays["document"], difference)
        return clustered_mean(sums, np.bincount(arrays["document"]))


def _interval(mean: float, interval: Any, *, digits: int = 4) -> str:
    low, high = interval
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _over_seeds(values: Sequence[float], *, digits: int = 2, most: float = np.inf) -> str:
    """Mean of a number of seeds and its 95 % interval by Student's t, not above `most`."""
    mean, count = float(np.mean(values)), len(values)
    half = student_t(count) * float(np.std(values, ddof=1)) / count**0.5
    return _interval(mean, (mean - half, min(most, mean + half)), digits=digits)


def _needle_table() -> str:
    lines = [
        "| model | seed | words | frozen | 1 reading | 2 | 3 | 4 | digits of 6, 1 and 4 readings |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    frozen = {
        (name, seed, run["words"]): f"{run['exact']['accuracy']:.2f}"
        for name, seed, record, _ in _finished("needle_frozen", "needle")
        for run in record["results"]["runs"]
    }
    short = HAYSTACKS["needle_1x"]
    for label, words in {"needle_1x": short, WINDOWED: short, **HAYSTACKS}.items():
        main: dict[int, list[float]] = {}
        for name, seed, record, _ in _finished(label, "needle"):
            runs = {run["readings"]: run for run in record["results"]["runs"]}
            for count, run in runs.items():
                if name == MAIN:
                    main.setdefault(count, []).append(run["exact"]["accuracy"])
            exact = {n: run["exact"] for n, run in runs.items()}
            shown = f"{name}, window" if label == WINDOWED else name
            cells = [shown, str(seed), str(words), frozen.get((shown, seed, words), "")]
            for n in (1, 2, 3, 4):
                cells.append(
                    _interval(exact[n]["accuracy"], exact[n]["interval"], digits=2)
                    if n in exact
                    else ""
                )
            cells.append(", ".join(f"{runs[n]['digits']:.1f}" for n in (1, 4) if n in runs))
            lines.append(f"| {' | '.join(cells)} |")
        if main and len(main[1]) > 1:
            shares = [_over_seeds(main[n], most=1.0) if n in main else "" for n in (1, 2, 3, 4)]
            lines.append(
                f"| {MAIN} | mean of {len(main[1])} | {words} | | {' | '.join(shares)} | |"
            )
    return "\n".join(lines)


def _reference_table() -> str:
    """Needles of the main model when it reads the question before the last write."""
    lines = ["| words | seed | 1 reading | 4 | rise |", "|---|---|---|---|---|"]
    rises: dict[int, list[float]] = {}
    for _, seed, record, _ in _finished("needle_reference", "needle"):
        runs = {(run["words"], run["readings"]): run["exact"] for run in record["results"]["runs"]}
        for words in sorted({words for words, _ in runs}):
            ends = [runs[words, readings] for readings in (1, 4)]
            rises.setdefault(words, []).append(ends[1]["accuracy"] - ends[0]["accuracy"])
            cells = [_interval(end["accuracy"], end["interval"], digits=2) for end in ends]
            lines.append(f"| {words} | {seed} | {' | '.join(cells)} | {rises[words][-1]:.2f} |")
    for words, values in rises.items():
        if len(values) > 1:
            lines.append(
                f"| {words} | mean of {len(values)} | | | {_over_seeds(values, most=1.0)} |"
            )
    return "\n".join(lines)


def _continual_table() -> str:
    lines = [
        f"| model | seed | {' | '.join(DOMAINS)} | adaptation | forgetting | unseen |",
        "|---" * (len(DOMAINS) + 5) + "|",
    ]
    for name, seed, record, _ in _finished("continual", "continual"):
        results = record["results"]
        losses = np.asarray(results["loss"])
        own = [losses[number + 1, number] - losses[0, number] for number in range(len(DOMAINS))]
        end = losses[-1] - losses[0]
        cells = [f"{now:.3f}, {later:.3f}" for now, later in zip(own, end, strict=True)]
        cells += [f"{results[key]:.4f}" for key in ("adaptation", "forgetting", "unseen")]
        lines.append(f"| {name} | {seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
