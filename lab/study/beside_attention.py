"""Trains associative recall beside attention that learns to look up, with FwPKM and without.

    taskset -c 1 python -m lab.study.beside_attention                      # what --out lacks
    taskset -c 1 python -m lab.study.beside_attention --runs attention:0   # one, KIND:SEED

The paper finds that a model with full attention ignores the memory, and that limiting attention in
nine of ten training steps makes it use the memory (findings 2 and 3). Both can only be tested where
attention alone solves the task, as it does in MQAR's smallest cell after a convolution
(`lab.comparison.mqar`). Kinds with `own` ask whether the memory is preferred because it
looks ahead: its tokens write their own value. A run ends when two validations have reached 0.99.
`--out` gets one JSON object per line and run; runs that it has are passed over, and an interrupted
run continues. The page of results is docs/measurements/study.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.options import parse
from lab.comparison.mqar_decoder import OWN_VALUE, Layout
from lab.comparison.mqar_tasks import Part, cell_of
from lab.comparison.mqar_training import Limited, Run, Training
from lab.study.lines import make_lines

FWPKM = "fwpkm_16"
OWN = FWPKM + OWN_VALUE
KINDS: dict[str, tuple[str, Limited | None]] = {
    "attention": ("attention", Limited("swa", 0.0)),
    "windows": ("swa", None),
    "fwpkm_attention": (f"{FWPKM}+attention", Limited(f"{FWPKM}+swa", 0.0)),
    "fwpkm_attention_pswa": (f"{FWPKM}+attention", Limited(f"{FWPKM}+swa", 0.9)),
    "fwpkm_windows": (f"{FWPKM}+swa", None),
    "fwpkm_own_attention": (f"{OWN}+attention", Limited(f"{OWN}+swa", 0.0)),
    "fwpkm_own_attention_pswa": (f"{OWN}+attention", Limited(f"{OWN}+swa", 0.9)),
    "fwpkm_own_windows": (f"{OWN}+swa", None),
}
"""The layers of each kind, behind the convolution; and what its attention is limited to, in which
share of the updates. With share 0 it is limited only when it is asked so."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates each kind of run."""

    runs: tuple[str, ...] = tuple(f"{kind}:{seed}" for seed in range(3) for kind in KINDS)
    """As KIND:SEED, in this order."""
    rate: float = 2.15e-3
    """Learning rate of the first epoch; it falls with a cosine, from epoch to epoch."""
    epochs: int = 8
    """Passes over the training documents."""
    validations: int = 4
    """Validations in an epoch."""
    window: int = 4
    """Tokens that limited attention sees, and half of those between two writes of FwPKM."""
    width: int = 64
    """Width of the residual stream."""
    documents: int = 100_000
    """Documents for training."""
    tested: int = 3000
    """Documents of validation and of the test."""
    batch_size: int = 512
    """Documents per update."""
    rows: int = 16
    """Documents computed at a time; changes no result except by rounding."""
    out: Path = Path("lab/results/beside_attention_cpu.jsonl")
    """File of the results, which are added to."""


def make_run(kind: str, seed: int, options: Options) -> dict[str, Any]:
    """Trains one run, or what is left of it, and reads the test in four ways."""
    name, limited = KINDS[kind]
    found = cell_of("cell", pairs=4, length=64)
    train, test = found.train[0].task, found.test[0].task
    cell = found._replace(
        train=(Part(train, options.documents),), test=(Part(test, options.tested),)
    )
    layout = Layout(width=options.width, chunk=2 * options.window, window=options.window)
    training = Training(
        name,
        layout,
        batch_size=options.batch_size,
        rows=options.rows,
        length=train.length,
        limited=limited,
    )
    run = Run(
        cell=cell,
        rate=options.rate,
        seed=seed,
        epochs=options.epochs,
        validations=options.validations,
        threshold=0.99,
        state=options.out.with_name(f"{options.out.stem}.{kind}-{seed}.npz"),
    )
    trained = run.train(training)
    weights = run.weights(training)
    (asked,) = run.documents(cell.test, "test")
    line = {"run": f"{kind}:{seed}", "rate": options.rate, "epochs": options.epochs}
    line |= {"window": options.window, "documents": options.documents}
    line |= {key: trained[key] for key in ("steps", "loss", "curve", "cpu_seconds")}
    ways = [False] if limited is None else [False, True]
    for short in ways:
        key = "limited" if short else "whole"
        line[key] = {
            way: round(training.accuracy(*weights, asked, write=write, limited=short), 4)
            for way, write in (("writing", True), ("frozen", False))
        }
    gates = training.gates(*weights, asked)
    line["gates"] = None if gates is None else [round(gate, 4) for gate in gates]
    run.state.unlink()
    jax.clear_caches()
    return line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Each run's shares of right answers, and its gates."""
    head = ["model", "seed", "updates", "right", "memory frozen", "attention limited", "both"]
    head += ["gate at questions", "elsewhere"]
    found = [head, ["---"] * len(head)]
    kinds = list(KINDS)
    for line in sorted(lines, key=lambda line: (kinds.index(_kind(line)), line["run"])):
        kind, _, seed = line["run"].partition(":")
        shares = [(line[key]["writing"], line[key]["frozen"]) if key in line else (None, None)
                  for key in ("whole", "limited")]  # fmt: skip
        if line["gates"] is None:  # Nothing that could be frozen.
            shares = [(written, None) for written, _ in shares]
        cells = [*shares[0], *shares[1], *(line["gates"] or (None, None))]
        shown = ["" if cell is None else f"{cell:.3f}" for cell in cells]
        found.append([f"`{kind}`", seed, str(line["steps"]), *shown])
    return "\n".join(f"| {' | '.join(row)} |" for row in found)


def _kind(line: dict[str, Any]) -> str:
    return line["run"].partition(":")[0]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)

    def make(kind: str, seed: int) -> dict[str, Any]:
        print(f"{kind} seed {seed}", flush=True)
        return make_run(kind, seed, options)

    print(table(make_lines(options.runs, KINDS, options.out, make)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
