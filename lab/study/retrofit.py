"""Puts a memory into a frozen model of books, trains it alone on needles, and asks for them.

    python -m lab.study.retrofit --out lab/results/retrofit_cpu.jsonl
    python -m lab.study.retrofit --runs fwpkm:0 --out lab/results/retrofit_cpu.jsonl

The page of results is docs/measurements/study.md. The backbone is that of the study, trained on
books without needles. `fwpkm` adds an FwPKM, `lora` low-rank updates with as many parameters; both
train alone, on the study's needles in books. Finished runs and evaluations are skipped, and an
interrupted training run continues. `--out` gets one JSON object per line and run.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import parse
from fwpkm_jax.evaluation import NeedleConfig, PerplexityConfig, run_suite
from fwpkm_jax.run import load_run
from fwpkm_jax.run.evaluate import subject_of
from fwpkm_jax.training.state import named_leaves, trained_names
from lab.study.lines import make_lines, train_run

KINDS: dict[str, tuple[str, ...]] = {
    "backbone": (),
    "fwpkm": (
        *("--model.memory_layers", "2", "--optimizer.train", ".*/memory/.*"),
        *("--model.fast_weight.gate_output", "True", "--model.fast_weight.gate_residual", "True"),
        *("--model.fast_weight.weight_by_gate", "True", "--optimizer.learning_rate", "1e-2"),
    ),
    "lora": (
        *("--model.lora.rank", "3", "--optimizer.train", ".*/lora_[ab]"),
        *("--optimizer.learning_rate", "2e-3"),
    ),
}
"""What each kind of run puts into the backbone and trains."""
RETROFITTED = (
    *("--data.needles.share", "0.5", "--data.needles.answer_weight", "4"),
    *("--data.needles.sentence_weight", "0"),
    *("--optimizer.warmup_steps", "20", "--optimizer.final_fraction", "0.01"),
)
"""Needles in half the rows. Their sentences weigh nothing, so that the model does not learn to
expect them in text; what other weights do is in docs/measurements/study.md."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates a backbone and what is put into it."""

    runs: tuple[str, ...] = (
        *("backbone:0", "fwpkm:0", "fwpkm:1", "fwpkm:2"),
        *("lora:0", "lora:1", "lora:2"),
    )
    """As KIND:SEED, in this order. The others are put into the backbone of seed 0."""
    config: str = "study/gdn_swa"
    """Name or file of the backbone's configuration."""
    extra: tuple[str, ...] = ()
    """More options of `fwpkm train` for every run, as NAME=VALUES without dashes."""
    backbone_steps: int = 500
    """Steps of the backbone."""
    steps: int = 200
    """Steps of the others."""
    words: tuple[int, ...] = (56,)
    """Words of the haystacks, each with five needles. 56 words and five needles are 515 bytes."""
    samples: int = 100
    """Haystacks of each length."""
    text: int = 100_000
    """Bytes of unseen books that the perplexity is taken of."""
    data: Path = Path("../shared/data/books")
    """Folder of train.jsonl and valid.jsonl."""
    runs_dir: Path = Path("runs/study/retrofit")
    """Folder of the runs."""
    out: Path = Path("lab/results/retrofit_cpu.jsonl")
    """File of the results, which are added to."""


def directory_of(options: Options, kind: str, seed: int) -> Path:
    return options.runs_dir / f"{kind}_seed{seed}"


def train(options: Options, kind: str, seed: int) -> None:
    """Trains a run, or what is left of it."""
    if kind == "backbone":
        command = [options.config, "--data.needles", "None"]
        command += ["--training.steps", str(options.backbone_steps)]
    else:
        command = ["--base", str(directory_of(options, "backbone", 0)), *RETROFITTED, *KINDS[kind]]
        command += ["--training.steps", str(options.steps)]
    directory = directory_of(options, kind, seed)
    train_run(directory, command, seed=seed, text=options.data, extra=options.extra)


def evaluate(options: Options, kind: str, seed: int) -> dict[str, Any]:
    """The line of a trained run."""
    directory = directory_of(options, kind, seed)
    run = load_run(directory)
    subject = subject_of(run, name=str(directory))
    writes = bool(run.memory)
    chosen: dict[str, tuple[str, Any]] = {
        "ppl": ("ppl", PerplexityConfig(max_tokens=options.text, write="both" if writes else "on")),
        "needle": (
            "needle",
            NeedleConfig(
                haystack_words=options.words,
                samples=options.samples,
                readings=(1, 4) if writes else (1,),
            ),
        ),
    }
    if writes:
        frozen = NeedleConfig(
            haystack_words=options.words, samples=options.samples, readings=(1,), write=False
        )
        chosen["needle_frozen"] = ("needle", frozen)
    found = {}
    for label, (evaluation, settings) in chosen.items():
        folder = directory / "study" / label
        path = folder / f"{evaluation}.json"
        if not path.exists():
            run_suite(subject, (evaluation,), directory=folder, configs={evaluation: settings})
        found[label] = json.loads(path.read_text())["results"]
    trained = trained_names(run.params, run.experiment.optimizer.train)
    sizes = {name: x.size for name, x in named_leaves(run.params).items()}
    line: dict[str, Any] = {
        "run": f"{kind}:{seed}",
        "steps": run.experiment.training.steps,
        "trained": sum(size for name, size in sizes.items() if name in trained),
        "slow_weights": sum(sizes.values()),
        "perplexity": found["ppl"]["writing"]["all"]["perplexity"],
    }
    if writes:
        line["perplexity_frozen"] = found["ppl"]["frozen"]["all"]["perplexity"]
    for label, prefix in (("needle", "readings"), ("needle_frozen", "frozen")):
        for one in found.get(label, {"runs": ()})["runs"]:
            line[f"words_{one['words']}_{prefix}_{one['readings']}"] = [
                one["exact"]["accuracy"],
                *one["exact"]["interval"],
                one["digits"],
            ]
    return line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The lines as a table; perplexities relative to the backbone's as well."""
    base = next((x["perplexity"] for x in lines if x["run"] == "backbone:0"), None)
    needles = list(dict.fromkeys(name for line in lines for name in line if name[:5] == "words"))
    head = ["run", "trained", "perplexity", "against the backbone"]
    head += [name.replace("_", " ") for name in needles]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        change = "" if base is None else f"{line['perplexity'] / base - 1:+.2%}"
        row = [line["run"], f"{line['trained']:,}", f"{line['perplexity']:.3f}", change]
        for name in needles:
            share, low, high, _ = line.get(name, (None,) * 4)
            row.append("" if share is None else f"{share:.2f} [{low:.2f}, {high:.2f}]")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)

    def make(kind: str, seed: int) -> dict[str, Any]:
        train(options, kind, seed)
        return evaluate(options, kind, seed)

    lines = make_lines(options.runs, KINDS, options.out, make)
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
