"""Measures multi-query associative recall (MQAR) with Zoology's settings.

    taskset -c 1 python -m lab.comparison.mqar --setting cell
    python -m lab.comparison.tables

Every memory is the second layer of the same small decoder, after the same gated convolution and
with the same embedding. `attention_positions` is the published control: two layers of attention
with learned positions. Each memory is trained with every learning rate of the published grid from
the first seed, and with the best of them, by validation, from the other seeds. A run ends when two
validations have reached `threshold`.

Every finished run is a line of `out`. A file beside it holds the run that was stopped, as of its
last validation, so the program can be stopped and started again at any time.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.core.recurrence.decay_starts import DecayStart
from lab.comparison.mqar_decoder import NAMES, Layout, state_bytes
from lab.comparison.mqar_tasks import Cell, Part, Setting, cell_of
from lab.comparison.mqar_training import Run, Training
from lab.comparison.small_decoders import Lines, Row


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and tests small decoders. Zero or an empty list means the published value."""

    setting: Setting = "cell"
    """cell: one length and number of pairs. mixed: trained on 4 to 64 pairs, tested to 256.
    stacked: key and value share a position, one layer. reassigned: keys get a second value."""
    memories: tuple[str, ...] = NAMES
    """Names of the memories, in this order; fwpkm_N has N sub-keys and N squared slots."""
    rates: tuple[float, ...] = ()
    """Learning rates to choose from, in this order."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; the first has every rate, the others the best one."""
    pairs: int = 4
    """Pairs of a document in `cell`."""
    length: int = 64
    """Tokens of a document in `cell`."""
    width: int = 64
    """Width of the residual stream."""
    heads: int = 2
    """Heads of a memory; `attention_positions` has one."""
    head_dim: int = 0
    """Channels of a head of matrix memories, Titans and LaCT; 0: width / heads."""
    chunk: int = 8
    """Tokens between two writes of FwPKM, FwMLP and LaCT, half of those of Titans; the window of
    windowed attention."""
    decay_start: DecayStart = "time_steps"
    """Where the learned decays of matrix memories begin."""
    tied_start: bool = False
    """Keys of matrix memories, Titans, TTT and LaCT begin as the queries of the same token."""
    batch_size: int = 0
    """Documents per update."""
    rows: int = 16
    """Documents computed at a time; changes no result except by rounding."""
    documents: int = 0
    """Most training documents in each part of an epoch."""
    tested: int = 0
    """Documents of each part of validation and test."""
    train_pairs: tuple[int, ...] = ()
    """Pairs of the training documents, of those that the setting has; none: all of them."""
    test_pairs: tuple[int, ...] = ()
    """The same of the documents of validation and test."""
    epochs: int = 0
    """Passes over the training documents; the learning rate falls to 0 at their end."""
    warmup: int = 0
    """Updates over which the learning rate rises from 0, linearly; published is none."""
    validations: int = 1
    """Validations in an epoch, so that a run can end before it is over."""
    threshold: float = 0.99
    """Accuracy that ends a run when two validations have reached it."""
    out: Path = Path("lab/results/mqar_cpu.jsonl")
    """File of the results; an existing file is continued."""


def cell(options: Options) -> Cell:
    """The setting with the numbers that the options replace."""
    found = cell_of(options.setting, pairs=options.pairs, length=options.length)
    most = options.documents
    train = _parts("train_pairs", found.train, options.train_pairs)
    test = _parts("test_pairs", found.test, options.test_pairs)
    train = tuple(Part(task, min(n, most) if most else n) for task, n in train)
    test = tuple(Part(task, options.tested or n) for task, n in test)
    return Cell(
        train,
        test,
        options.batch_size or found.batch_size,
        options.epochs or found.epochs,
        options.rates or found.rates,
    )


def _parts(name: str, parts: Sequence[Part], pairs: Sequence[int]) -> Sequence[Part]:
    """The parts with so many pairs, of an option of that name; all if it is empty.

    Raises:
      SystemExit: no part has one of the numbers.
    """
    known = [part.task.pairs for part in parts]
    if unknown := sorted(set(pairs) - set(known)):
        raise SystemExit(f"--{name.replace('_', '-')}: {unknown} are not among {known}.")
    return [part for part in parts if part.task.pairs in (pairs or known)]


def settings(options: Options) -> Row:
    """What distinguishes a run from others of the same memory, rate and seed."""
    chosen = cell(options)
    about = {"setting": options.setting, "width": options.width, "heads": options.heads}
    about |= {"chunk": options.chunk, "decay_start": options.decay_start}
    about |= {"batch_size": chosen.batch_size, "epochs": chosen.epochs}
    about["train"] = [[p.task.pairs, p.task.length, p.documents] for p in chosen.train]
    about["test"] = [[p.task.pairs, p.task.length, p.documents] for p in chosen.test]
    about |= {"validations": options.validations, "threshold": options.threshold}
    changed = {"warmup": options.warmup, "tied_start": options.tied_start}
    changed |= {"head_dim": options.head_dim}
    return about | {name: value for name, value in changed.items() if value}


def layout_of(options: Options) -> Layout:
    """Sizes of the decoders."""
    return Layout(
        width=options.width,
        heads=options.heads,
        head_dim=options.head_dim,
        chunk=options.chunk,
        stacked=options.setting == "stacked",
        decay_start=options.decay_start,
        tied_start=options.tied_start,
    )


def best_rate(rows: Sequence[Row]) -> float:
    """The rate of the highest validation accuracy; among equals that with the fewest steps."""
    best = max(rows, key=lambda row: (row["valid"], -row["steps"]))
    return best["rate"]


def measure(name: str, rate: float, seed: int, options: Options, lines: Lines) -> None:
    """Makes one run, unless the file has it."""
    about, chosen = settings(options), cell(options)
    if lines.find(memory=name, rate=rate, seed=seed, settings=about):
        return
    print(f"{name} rate {rate} seed {seed}", flush=True)
    layout = layout_of(options)
    length = max(part.task.length for part in (*chosen.train, *chosen.test))
    training = Training(
        name,
        layout,
        batch_size=chosen.batch_size,
        rows=options.rows,
        length=length,
        warmup=options.warmup,
    )
    run = Run(
        cell=chosen,
        rate=rate,
        seed=seed,
        epochs=chosen.epochs,
        validations=options.validations,
        threshold=options.threshold,
        state=options.out.with_name(f"{options.out.stem}.{_mark(name, rate, seed, about)}.npz"),
    )
    result = run.train(training)
    total, touched = state_bytes(name, layout, length=max(p.task.length for p in chosen.train))
    row = {"memory": name, "rate": rate, "seed": seed, "settings": about}
    row |= {"state_bytes": total, "bytes_touched": touched, "parameters": training.parameters}
    row["rows"] = options.rows
    lines.add(row | result | {"environment": environment_once()})
    run.state.unlink()
    shown = " ".join(f"{x['pairs']}x{x['length']}:{x['accuracy']}" for x in result["test"])
    print(f"  {result['steps']} steps, {result['cpu_seconds']:.0f} s: {shown}", flush=True)
    jax.clear_caches()


def _mark(name: str, rate: float, seed: int, about: Row) -> str:
    """A part of a file's name that tells unfinished runs apart."""
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:8]
    return f"{name}-{rate}-{seed}-{digest}"


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the runs that the results lack: every memory with a rate, then with the next."""
    options = parse(Options, argv, description=__doc__)
    lines, about = Lines(options.out), settings(options)
    for name in options.memories:  # Before any of them is trained.
        try:
            state_bytes(name, layout_of(options), length=1)
        except ValueError as error:
            raise SystemExit(f"--memories {name}: {error}") from None
    first, *others = options.seeds
    rates = cell(options).rates
    for rate in rates:
        for name in options.memories:
            measure(name, rate, first, options, lines)
    for seed in others:
        for name in options.memories:
            tried = lines.find(memory=name, seed=first, settings=about)
            tried = [row for row in tried if row["rate"] in rates]
            measure(name, best_rate(tried), seed, options, lines)


if __name__ == "__main__":
    main()
