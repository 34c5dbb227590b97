"""Trains recall beside full attention that learns to look up, with FwPKM and without.

    python -m benchmarks.study.beside_attention                          # what is missing in --out
    python -m benchmarks.study.beside_attention --runs attention:0       # one of them, KIND:SEED

The paper finds that a model with full attention ignores the memory, and that limiting attention in
nine of ten training steps makes it use the memory (findings 2 and 3). Both can only be tested where
attention alone solves the task. Every kind has two layers and the task of `fwpkm train recall`.
`--out` gets one JSON object per line and run; runs that it has are passed over, and an interrupted
run continues. The page of results is docs/measurements/study.md.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.machine import environment
from benchmarks.options import parse
from benchmarks.study.lines import make_lines
from benchmarks.study.study import limited
from fwpkm_jax.data import make_dataset
from fwpkm_jax.evaluation import Subject
from fwpkm_jax.evaluation.recall import RecallConfig, recall_accuracy
from fwpkm_jax.run import load_run
from fwpkm_jax.run.evaluate import subject_of
from fwpkm_jax.training.micro_batches import broadcast_memory

ATTENTION = ("--model.mixers", "swa", "attention")
ALONE = ("--model.memory_layers",)
KINDS: dict[str, tuple[str, ...]] = {
    "windows": ALONE,
    "windows_fwpkm": (),
    "attention": (*ATTENTION, *ALONE),
    "attention_fwpkm": ATTENTION,
    "attention_fwpkm_pswa": (*ATTENTION, "--training.window_probability", "0.9"),
}
"""Options of each kind; the second layer has windows or full attention, FwPKM before it or not."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates each kind of run."""

    runs: tuple[str, ...] = tuple(f"{kind}:{seed}" for seed in range(3) for kind in KINDS)
    """As KIND:SEED, in this order."""
    steps: int = 3000
    """Steps of each run."""
    extra: tuple[str, ...] = ()
    """More options of `fwpkm train` for every run, as NAME=VALUES without dashes."""
    batches: int = 8
    """Batches of the validation split that are asked."""
    runs_dir: Path = Path("runs/study/beside_attention")
    """Folder of the runs."""
    out: Path = Path("benchmarks/results/beside_attention_cpu.jsonl")
    """File of the results, which are added to."""


def train(options: Options, kind: str, seed: int) -> Path:
    """The directory of a run, trained as far as it was not."""
    directory = options.runs_dir / f"{kind}_seed{seed}"
    if (directory / "results.json").exists():
        return directory
    command = ["recall", *KINDS[kind], "--training.steps", str(options.steps)]
    for extra in options.extra:
        name, value = extra.split("=", 1)
        command += [f"--{name}", *value.split()]
    command += ["--seed", str(seed), "--run_dir", str(directory)]
    subprocess.run([sys.executable, "-m", "fwpkm_jax", "train", *command], check=True)
    return directory


def evaluate(options: Options, kind: str, seed: int) -> dict[str, Any]:
    """The line of a trained run: shares of right answers, and gates."""
    directory = train(options, kind, seed)
    run = load_run(directory)
    subject = subject_of(run, name=str(directory))
    line: dict[str, Any] = {"run": f"{kind}:{seed}", "steps": run.experiment.training.steps}
    line["whole"] = shares(subject, options.batches)
    if "attention" in subject.model.config.mixers:
        line["window"] = shares(limited(subject), options.batches)
    if subject.memory:
        line["gates"] = gates(subject, options.batches)
    return line | {"environment": environment()}


def shares(subject: Subject, batches: int) -> dict[str, Any]:
    """Share of right answers with the memory written and frozen, and their number."""
    result = recall_accuracy(
        subject.model,
        subject.memory,
        config=RecallConfig(batches=batches),
        batches=rows(subject),
        lifetime=subject.lifetime,
        groups=subject.groups,
        num_values=subject.data.num_answers or 0,
    ).record["results"]
    found = {way: round(result[way]["all"]["accuracy"], 5) for way in ("writing", "frozen")}
    return found | {"answers": result["writing"]["all"]["answers"]}


def gates(subject: Subject, batches: int) -> dict[str, Any]:
    """By memory layer, the mean gate where a value is asked for, and elsewhere."""
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    memory = broadcast_memory(subject.memory, subject.groups)
    for batch, _ in zip(rows(subject), range(batches), strict=False):
        out = subject.model(jnp.asarray(batch["tokens"][:, :-1]), memory)
        asked = batch["answer_distance"] > 0
        for layer, info in out.info.items():
            of = found.setdefault(layer, {"answers": [], "others": []})
            gate = np.asarray(info.gate)
            of["answers"].append(gate[asked])
            of["others"].append(gate[~asked])
    return {
        layer: {name: round(float(np.concatenate(x).mean()), 5) for name, x in of.items()}
        for layer, of in found.items()
    }


def rows(subject: Subject) -> Any:
    """Batches that training did not see."""
    data = replace(subject.data, num_workers=0)
    return make_dataset(data, split="valid", batch_size=subject.batch_size, seed=subject.seed)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Each run's shares of right answers, and its gates."""
    head = ["model", "seed", "right", "memory frozen", "attention limited", "both"]
    head += ["gate at answers", "elsewhere"]
    found = [head, ["---"] * len(head)]
    order = [f"{kind}:{seed}" for kind in KINDS for seed in range(100)]
    for line in sorted(lines, key=lambda line: order.index(line["run"])):
        kind, _, seed = line["run"].partition(":")
        whole, window = line["whole"], line.get("window", {})
        memory = next(iter(line.get("gates", {}).values()), {})
        cells = [whole["writing"], whole["frozen"] if memory else None]
        cells += [window.get("writing"), window.get("frozen") if memory else None]
        cells += [memory.get("answers"), memory.get("others")]
        found.append([f"`{kind}`", seed, *("" if x is None else f"{x:.3f}" for x in cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in found)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)

    def make(kind: str, seed: int) -> dict[str, Any]:
        line = evaluate(options, kind, seed)
        print(json.dumps(line), flush=True)
        return line

    print(table(make_lines(options.runs, KINDS, options.out, make)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
