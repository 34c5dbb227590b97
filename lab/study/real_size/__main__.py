"""Trains variants of a model of bytes side by side and evaluates them, all within a given time.

    python -m lab.study.real_size --prepare --data ../shared/data/books_large --out .sitting
    python -m lab.study.real_size --compile-for h100 --out .sitting/programs
    python -m lab.study.real_size --data .sitting --executables .sitting/programs \
        --out runs/real_size --seconds 280

compiles the programs of the variants side by side, trains the variants in turns on the same rows
(the number of steps is chosen by a short timing of them), and reads unseen books and needles. The
first command packs a choice of books for a machine that takes few bytes; the third reads such a
folder or `books_large` itself. The second makes the programs ahead of time, so that the third loads
them in place of tracing, compiling and checking kernels; without them it does all three. `--size
rehearsal` has two million weights, for a CPU.

A line of JSON is written to `OUT/lines.jsonl` as soon as it is known, so that an end by time or by
a fault leaves all before it. `OUT/VARIANT_0.bin` and so on hold the last variant's weights. The
page of results is docs/measurements/real_size.md.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks.machine import commit
from benchmarks.options import parse
from fwpkm_jax.models.config import ModelConfig
from lab.study.real_size import evaluation, executables, kernels, sizes, text, training
from lab.study.real_size.checkpoint import load_checkpoint, save_checkpoint
from lab.study.real_size.programs import Programs, compile_programs, futures_of, wait
from lab.study.real_size.sizes import SIZES, SizeName
from pallas_kernels import dispatch


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates variants within a given time."""

    data: Path | None = None
    """Folder of train*.jsonl.xz and valid.jsonl.xz; only --compile-for needs none."""
    out: Path
    """Folder of the lines and of the checkpoint, or with --prepare of the packed books."""
    prepare: bool = False
    """Packs a choice of books, and does nothing else."""
    compile_for: Literal["cpu", "h100"] | None = None
    """Writes the variants' programs for a device that need not be here (cpu: for this one) into
    --out, and does nothing else."""
    executables: Path | None = None
    """Folder of --compile-for; programs that do not load are compiled, and a line says why."""
    train_bytes: int = 74_000_000
    """With --prepare: text to train on, at most."""
    valid_bytes: int = 200_000
    """With --prepare: beginning of each unseen book."""
    size: SizeName = "real"
    """real: 24 million weights, rows of 4,096 bytes; rehearsal: two million, 1,024; tiny: for a
    test."""
    variants: tuple[str, ...] = ("backbone", "fwpkm")
    """Two or more of backbone, fwpkm, pkm, both (PKM and FwPKM)."""
    seed: int = 0
    """Of weights, order of books and needles."""
    seconds: float = 280
    """After which nothing new is begun."""
    evaluation_seconds: float = 60
    """Of them, what training leaves."""
    steps: int | None = None
    """Steps of each variant, at most; None: until the text has been read once."""
    book_rows: int = 32
    """Rows of each unseen book that are read, at most."""
    books: int | None = None
    """Unseen books that are read, at most; None: all."""
    batches: int = 8
    """Batches of haystacks of one row; half as many of longer ones."""
    readings: int = 4
    """Readings of a haystack."""
    checkpoint_files: int = 2
    """Files of the last variant's weights, at most, of 15 MiB; 0: none."""
    verdicts: Path | None = None
    """`verdicts.json` of an earlier sitting (`benchmarks.bring_up`), which spares the kernels'
    checks where kernels and device are the same; None: they run, side by side."""
    cache: Path | None = None
    """Folder of compiled programs, to keep them for the next run on the same machine."""


class Lines:
    """Writes lines of JSON, each with the seconds since the start."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.began = time.monotonic()

    def write(self, **line: Any) -> None:
        line = {"at": round(time.monotonic() - self.began, 1), **line}
        shown = json.dumps(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{shown}\n")
        print(shown if len(shown) < 300 else f"{shown[:300]} ...", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    unknown = [name for name in options.variants if name not in sizes.VARIANTS]
    if unknown or not options.variants:
        raise SystemExit(f"--variants: {unknown} are none of {tuple(sizes.VARIANTS)}.")
    if options.compile_for is not None:
        models = {name: sizes.model_of(name, options.size) for name in options.variants}
        made = {"device": options.compile_for, "write": Lines(options.out / "made.jsonl").write}
        executables.make(models, SIZES[options.size], options.out, **made)
        return 0
    if options.data is None:
        raise SystemExit("--data: name a folder of books.")
    if options.prepare:
        packed = text.pack_books(
            options.data,
            options.out,
            train_bytes=options.train_bytes,
            valid_bytes=options.valid_bytes,
            seed=options.seed,
        )
        print(f"{options.out}: {packed / 2**20:.1f} MiB")
        return 0
    if options.cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.cache))
    lines = Lines(options.out / "lines.jsonl")
    try:
        run(options, lines)
    except BaseException as error:
        lines.write(part="failed", error=f"{type(error).__name__}: {error}"[:1000])
        raise
    lines.write(part="end")
    return 0


def run(options: Options, lines: Lines) -> None:
    """All parts, one after the other; each writes its lines."""
    size, end = SIZES[options.size], lines.began + options.seconds
    models = {name: sizes.model_of(name, options.size) for name in options.variants}
    lines.write(part="about", **about(options))
    reading = ThreadPoolExecutor(1).submit(_read, options, size)
    futures = start_programs(options, models, size, lines)
    books, rows, counts = reading.result()
    lines.write(part="data", train_bytes=sum(map(len, books.train)), steps_of_text=rows.steps)

    ready = {
        name: programs._replace(step=programs.step.result(), init=programs.init.result())
        for name, programs in futures.items()
    }
    lines.write(part="compiled", programs="training")
    # The rest is nearly ready; it would disturb the timing.
    rest = [future for one in futures.values() for future in futures_of(one)]
    concurrent.futures.wait(rest, timeout=max(end - time.monotonic(), 0) / 2)
    lines.write(part="compiled", programs="all")
    seconds = {
        name: training.step_seconds(programs, rows, seed=options.seed, turn=size.turn)
        for name, programs in ready.items()
    }
    until = end - options.evaluation_seconds
    steps = training.planned_steps(
        seconds,
        available=until - time.monotonic(),
        most=rows.steps if options.steps is None else options.steps,
        turn=size.turn,
    )
    lines.write(
        part="plan", step_ms={n: round(1e3 * s, 2) for n, s in seconds.items()}, steps=steps
    )
    states = training.train(
        ready, rows, seed=options.seed, steps=steps, turn=size.turn, until=until, write=lines.write
    )
    programs = {name: wait(one) for name, one in futures.items()}
    trained = {
        name: evaluation.Trained(programs[name], state.params, state.memory)
        for name, state in states.items()
    }
    del states
    keep(options, trained, books.valid, size, lines)
    evaluate(options, trained, books.valid, counts, lines, end=end)


def start_programs(
    options: Options, models: dict[str, ModelConfig], size: sizes.Size, lines: Lines
) -> dict[str, Programs]:
    """The programs: loaded where there are files, or traced here and compiling.

    The kernels of what is compiled here are checked before.
    """
    made: dict[tuple[str, str], Any] = {}
    if options.executables is not None:
        made, failed = executables.load(options.variants, options.executables)
        lines.write(part="loaded", programs=sorted(map(".".join, made)), failed=failed)
    if not {(name, "step") for name in models} <= made.keys():
        lines.write(part="checked", **kernels.prepare(options.verdicts))
    dispatch.decisions.clear()
    # The programs that are missing behind a loaded step have its kernels, unchecked here.
    unchecked = made and jax.default_backend() == "gpu"
    with dispatch.compile_kernels("gpu") if unchecked else contextlib.nullcontext():
        futures = compile_programs(models, size, made=made)
    chosen = [[*one, times] for one, times in sorted(dispatch.decisions.items())]
    lines.write(part="traced", kernels=chosen)
    return futures


def _read(options: Options, size: sizes.Size) -> tuple[text.Books, text.TrainingText, np.ndarray]:
    """The books, the rows of training and the trigrams of its text."""
    assert options.data is not None
    books = text.read_books(options.data)
    rows = text.TrainingText(books.train, size, seed=options.seed)
    return books, rows, evaluation.trigram_counts(books.train)


def about(options: Options) -> dict[str, Any]:
    """What a line must say for the others to be understood."""
    device = jax.devices()[0]
    return {
        "commit": commit(),
        "device": device.device_kind,
        "machine": platform.machine(),
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "size": options.size,
        "variants": options.variants,
        "seed": options.seed,
        "seconds": options.seconds,
    }


def keep(
    options: Options,
    trained: dict[str, evaluation.Trained],
    books: Sequence[bytes],
    size: sizes.Size,
    lines: Lines,
) -> None:
    """Stores the last variant's weights, and what eight bits cost in loss."""
    name = options.variants[-1]
    variant = trained[name]
    if not options.checkpoint_files:
        return
    files = save_checkpoint(variant.params, options.out, name, most_files=options.checkpoint_files)
    if not files:
        lines.write(part="checkpoint", variant=name, files=[], reason="too large")
        return
    restored = load_checkpoint(variant.params, options.out, name)
    tokens, lengths = next(iter(evaluation.book_batches(books, size, rows=1)))
    losses = [
        float(np.asarray(one.read(one.memory, tokens, "frozen")[0].nats)[: len(lengths)].mean())
        for one in (variant, variant._replace(params=restored))
    ]
    lines.write(
        part="checkpoint",
        variant=name,
        files={file.name: file.stat().st_size for file in files},
        nats_more=round(losses[1] - losses[0], 5),
    )


def evaluate(
    options: Options,
    trained: dict[str, evaluation.Trained],
    books: Sequence[bytes],
    counts: np.ndarray,
    lines: Lines,
    *,
    end: float,
) -> None:
    """The evaluations in the order in which they matter, until time runs out.

    One that fails leaves a line that says how, and the next one is made.
    """
    size = SIZES[options.size]
    common = {"until": end, "write": lines.write}
    unseen = books if options.books is None else books[: options.books]
    read_unseen = functools.partial(
        *(evaluation.read_unseen, trained, unseen, size),
        rows=options.book_rows,
        counts=counts,
        **common,
    )
    parts: list[tuple[dict[str, Any], Callable[[], None]]] = [({"of": "text"}, read_unseen)]
    first, *longer = size.haystacks
    asked = [(first, words, options.batches) for words in evaluation.WORDS]
    asked += [(rows, "held out", max(options.batches // 2, 1)) for rows in longer]
    for rows, words, batches in asked:
        ask = functools.partial(
            *(evaluation.ask_needles, trained, books, size),
            rows=rows,
            words=words,
            batches=batches,
            readings=options.readings,
            seed=options.seed,
            **common,
        )
        parts.append(({"of": "needles", "rows": rows, "words": words}, ask))
    for name, part in parts:
        if time.monotonic() > end:
            lines.write(part="skipped", **name)
            continue
        try:
            part()
        except Exception as error:  # The next one may still have results.
            lines.write(part="failed", **name, error=f"{type(error).__name__}: {error}"[:1000])


if __name__ == "__main__":
    sys.exit(main())
