"""Trains and evaluates shipped configs, for the tables of docs/measurements/recall.md.

    python -m lab.study.shipped                  every run, one after another
    python -m lab.study.shipped --runs recall:0  some of them, as NAME:SEED

Finished parts are skipped; an interrupted training run continues. Runs are folders of `--runs-dir`,
and each is a line of JSON in `--out`.
"""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import parse
from fwpkm_jax.run.evaluate import evaluate
from lab.study.lines import make_lines, metrics, train_run, trained_loss

FORMER_START = (
    *("--model.init_std", "0.02", "--model.tie_embeddings", "True"),
    *("--model.branch_init_scale", "1.0", "--optimizer.weight_decay", "0.1"),
)
"""The start that books_tiny had until 2026-11-22, with which its gate closes."""
HALF_GATE = ("--model.fast_weight.gate_bias", "0")
"""Gates that start at a half, as those of recall_carried did until 2026-11-25."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "recall": ("recall",),
    "recall_without_memory": ("recall_without_memory",),
    "sdm": ("sdm",),
    "recall_carried": ("recall_carried",),
    "recall_carried_half": ("recall_carried", *HALF_GATE, "--training.steps", "3000"),
    "recall_carried_full_writes": (
        *("recall_carried", *HALF_GATE, "--model.fast_weight.weight_by_gate", "False"),
    ),
    "books_tiny": ("books_tiny",),
    "books_without_memory": ("books_tiny", "--model.memory_layers"),
    "books_open": ("books_tiny", "--model.fast_weight.gate_bias", "2"),
    "books_start": ("books_tiny", "--training.steps", "125"),
    "books_former_start": ("books_tiny", "--training.steps", "125", *FORMER_START),
}
"""Arguments of `fwpkm train` by the name of a run. What begins with `books` reads `--data`."""
_ONCE = (
    *("recall_carried_half", "recall_carried_full_writes"),
    *("books_open", "books_start", "books_former_start"),
)
SEEDS = dict.fromkeys(_ONCE, (0,))
"""Seeds of a name, where they are not 0, 1 and 2."""
GATE_STEPS = (1, 25, 50, 75, 100, 125, 200, 400, 600, 800)
"""Training steps whose mean gate is stored."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates shipped configs."""

    runs: tuple[str, ...] = tuple(
        f"{kind}:{seed}" for kind in KINDS for seed in SEEDS.get(kind, (0, 1, 2))
    )
    """As NAME:SEED; those that `--out` has are passed over."""
    extra: tuple[str, ...] = ()
    """More options of `fwpkm train` for every run, as NAME=VALUES without dashes."""
    data: Path = Path("../shared/data/books")
    """Folder of train.jsonl and valid.jsonl, read by the runs whose names begin with books."""
    runs_dir: Path = Path("runs/study/shipped")
    """Folder of the runs."""
    out: Path = Path("lab/results/shipped_cpu.jsonl")
    """File of the results, which are added to."""


def make_run(options: Options, kind: str, seed: int) -> dict[str, Any]:
    """Trains and evaluates one run; its line of results."""
    directory = options.runs_dir / f"{kind}_seed{seed}"
    text = options.data if kind.startswith("books") else None
    train_run(directory, KINDS[kind], seed=seed, text=text, extra=options.extra)
    trained = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    line: dict[str, Any] = {"run": f"{kind}:{seed}", "arguments": [*KINDS[kind], *options.extra]}
    line |= {name: trained[name] for name in ("steps", "parameters")}
    line |= {"train_loss": round(trained_loss(directory), 5)}
    line["validation_loss"] = trained["validation"]["loss"] if trained["validation"] else None
    line |= {"train_seconds": trained["session"]["train_seconds"], "gates": gates(directory)}
    results = evaluate(directory)
    return line | {name: _overall(result.record["results"]) for name, result in results.items()}


def gates(directory: Path) -> dict[str, float]:
    """Mean gate of the only memory layer by training step; empty without a gate."""
    return {
        str(line["step"]): round(value, 4)
        for line in metrics(directory)
        if line["step"] in GATE_STEPS
        for name, value in line.items()
        if name.endswith("/gate_mean")
    }


def _overall(results: Mapping[str, Any]) -> dict[str, Any]:
    """Of an evaluation's results, what is said of all tokens or answers, by the way of reading."""
    return {
        way: result["all"]
        for way, result in results.items()
        if isinstance(result, dict) and "all" in result
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Each run's loss in training, and its evaluation written and frozen."""
    head = ["run", "steps", "training loss", "validation", "written", "frozen", "difference"]
    found = [head, ["---"] * len(head)]
    for line in _by_kind(lines):
        loss = line["validation_loss"]
        cells = [line["run"], str(line["steps"]), f"{line['train_loss']:.4f}"]
        cells.append("" if loss is None else f"{loss:.4f}")
        result = line["recall"] if "recall" in line else line["ppl"]
        for way in ("writing", "frozen"):
            cells.append("" if way not in result else _shown(result[way]))
        change = result.get("difference")
        cells.append("" if change is None else _with_interval(change["loss"], change["interval"]))
        found.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in found)


def gates_table(lines: Sequence[dict[str, Any]]) -> str:
    """Mean gate of each run with a memory by training step."""
    found = [line for line in _by_kind(lines) if line["gates"]]
    steps = sorted({int(step) for line in found for step in line["gates"]})
    rows = [["run", *(f"step {step}" for step in steps)]]
    rows.append(["---"] * len(rows[0]))
    for line in found:
        gates = {int(step): gate for step, gate in line["gates"].items()}
        shown = [f"{gates[step]:.2f}" if step in gates else "" for step in steps]
        rows.append([line["run"], *shown])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _by_kind(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The seeds of a kind together, in order; kinds as they are known here."""
    kinds = list(KINDS)
    return sorted(lines, key=lambda x: (kinds.index(x["run"].partition(":")[0]), x["run"]))


def _shown(result: Mapping[str, Any]) -> str:
    """A share of right answers, or a perplexity."""
    if "accuracy" in result:
        return _with_interval(result["accuracy"], result["interval"], digits=3)
    return f"{result['perplexity']:.4f}"


def _with_interval(value: float, interval: Sequence[float], *, digits: int = 4) -> str:
    low, high = interval
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)

    def make(kind: str, seed: int) -> dict[str, Any]:
        return make_run(options, kind, seed)

    print(table(make_lines(options.runs, KINDS, options.out, make)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
