"""Trains and evaluates the models of lab/study/configs.py, and prints their tables.

The page of results is lab/archive/study.md.

    python -m lab.study.study                          every run, one after another
    python -m lab.study.study --runs gdn_swa__fwpkm:0  some of them, as NAME:SEED
    python -m lab.study.study --tables                 the tables of finished runs

Memories mix their read by the paper's gate. A name that ends with `__ungated` stands for the config
before the ending, with read and value added and every token written in full; one that ends with
`__inner4` for the config with four value steps per chunk, in training and afterwards; one that ends
with `__800` for 800 steps of training in place of 400; one that ends with `__open` for gates that
start open. A backbone with `__keeping` starts by keeping what it holds, and one with `__tied` with
keys that begin as its queries.

Finished parts are skipped; an interrupted training run continues. Results go to
`runs/study/NAME_seedS/study/EVALUATION/`, and one line of JSON for each of them to `--out`.
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

from benchmarks.options import parse
from fwpkm_jax.evaluation import (
    EVALS,
    NeedleConfig,
    PerplexityConfig,
    Subject,
    run_suite,
    save_result,
)
from fwpkm_jax.evaluation.reconfigure import reconfigure
from fwpkm_jax.paper.evaluation.continual import ContinualConfig
from fwpkm_jax.paper.evaluation.longbench import LongBenchConfig
from fwpkm_jax.run import load_run
from fwpkm_jax.run.evaluate import subject_of
from lab.study import controls
from lab.study.figures import results_of
from lab.study.lines import make_lines, trained_loss
from lab.study.tables import tables

RUNS_DIR = Path("runs/study")
CONFIGS = "lab/study/configs.py"
DATA = Path("../shared/data")
EXCERPTS = RUNS_DIR / "books_excerpts.jsonl"
EXCERPT_CHARACTERS = 12_500

MAIN = "gdn_swa__fwpkm"
UNGATED = "__ungated"
"""Ending of a name whose memories add read and value, and write every token in full."""
REREADING = "__inner4"
"""Ending of a name whose memories read and write each chunk four times before it is left."""
LONGER = "__800"
"""Ending of a name whose models are trained for 800 steps."""
OPEN = "__open"
"""Ending of a name whose gates start open, at about 0.88."""
KEEPING = "__keeping"
"""Ending of a name whose Gated DeltaNet starts by keeping what it holds, as published layers do."""
TIED = "__tied"
"""Ending of a name whose Gated DeltaNet has keys that begin as its queries."""
WITHOUT_GATES = (
    *("--model.fast_weight.gate_output", "False"),
    *("--model.fast_weight.weight_by_gate", "False"),
)
ENDINGS = {
    UNGATED: WITHOUT_GATES,
    REREADING: ("--model.fast_weight.rule.inner_steps", "4"),
    LONGER: ("--training.steps", "800"),
    OPEN: ("--model.fast_weight.gate_bias", "2"),
    KEEPING: ("--model.gdn.decay_start", "time_steps"),
    TIED: ("--model.gdn.key_start", "queries"),
}
"""More options of `fwpkm train` by the ending of a name."""
SEEDS = {
    MAIN: (0, 1, 2),
    "gdn_swa": (0, 1, 2),
    MAIN + UNGATED: (0, 1, 2),
    MAIN + REREADING: (0, 1, 2),
    MAIN + LONGER: (2,),
    MAIN + UNGATED + LONGER: (2,),
    MAIN + OPEN: (0, 1, 2),
    "gdn_swa__sdm" + OPEN: (0,),
    "gdn_swa" + KEEPING: (0,),
    "gdn_swa" + KEEPING + TIED: (0,),
    "gdn_swa__pkm": (0, 1, 2),
    "gdn_swa__pkm_fwpkm": (0, 1, 2),
    "gdn_swa__fwmlp": (0, 1, 2),
    "lact": (0, 1, 2),
    "fa": (0, 1, 2),
    "fa__fwpkm": (0, 1, 2),
    "fa__fwpkm__pswa": (0, 1, 2),
}
"""Configs, some with one of `ENDINGS` or several, and their seeds, in the order of the runs."""

DOMAINS = ("math", "law", "philosophy", "biomed", "irc", "patents")
HAYSTACKS = {"needle_1x": 56, "needle_8x": 700, "needle_15x": 1400}
"""Words per haystack by result; 56 words and five needles are about one training row."""
WINDOWED = "needle_window"
"""Needles at the shortest length for the pSWA model, with attention limited to its window."""
ABLATED = "ppl_ablated"
"""Perplexity with a frozen memory whose slots are zero, so that nothing is read."""
OTHER = "needle_other"
"""Needles at the shortest length, stated and asked for in words that training never used."""
STILL = "_still"
"""Ending of needle evaluations with keys that stand still after training."""
LONGEST_QUESTION = 60_000
"""Bytes of the longest sample of LongBench that is read."""
GATE_ROWS = 64
"""Rows with needles whose gates are read."""


def evaluations(name: str, *, has_memory: bool) -> dict[str, tuple[str, Any]]:
    """Evaluation and options by the name of the result."""
    domains = tuple(f"{domain}={DATA / 'domains' / domain}" for domain in DOMAINS)
    return {
        "ppl": (
            "ppl",
            PerplexityConfig(write="both" if has_memory else "on"),
        ),
        **{
            label: ("needle", options)
            for label, options in _needles(name, has_memory=has_memory).items()
        },
        **(_long_answers() if name.removesuffix(UNGATED) == MAIN else {}),
        **(_controls() if _reads_slots(name) else {}),
        "continual": (
            "continual",
            ContinualConfig(domains=domains, max_batches=16, max_eval_batches=4),
        ),
    }


def _needles(name: str, *, has_memory: bool) -> dict[str, NeedleConfig]:
    """Needle evaluations; the main model answers more needles."""
    short, long, longest = HAYSTACKS.values()
    if config_of(name)[0] == MAIN and REREADING not in name:
        every, ends = (1, 2, 3, 4), (1, 4)
        near = NeedleConfig(haystack_words=(short,), samples=100, readings=every)
        far = NeedleConfig(haystack_words=(long,), samples=120, readings=every)
        farthest = NeedleConfig(haystack_words=(longest,), samples=40, readings=ends)
        return {
            "needle_1x": near,
            "needle_8x": far,
            "needle_1x" + STILL: replace(near, readings=ends),
            "needle_8x" + STILL: replace(far, readings=ends),
            "needle_15x": farthest,
            "needle_15x" + STILL: farthest,
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


def _controls() -> dict[str, tuple[str, Any]]:
    """More of models with FwPKM: a memory that is reset, no reads, needles in other words."""
    short, long, _ = HAYSTACKS.values()
    near = NeedleConfig(
        haystack_words=(short,), samples=100, readings=(1, 4), reset_memory_between_samples=True
    )
    return {
        "ppl_reset": ("ppl", PerplexityConfig(write="on", memory_reset="document")),
        ABLATED: ("ppl", PerplexityConfig(write="off")),
        "needle_reset": ("needle", near),
        "needle_8x_reset": ("needle", replace(near, haystack_words=(long,), samples=120)),
        OTHER: ("needle", NeedleConfig(samples=100, readings=(1, 4))),
    }


def _long_answers() -> dict[str, tuple[str, Any]]:
    options = LongBenchConfig(data=str(DATA / "longbench"), max_tokens=LONGEST_QUESTION)
    return {"longbench": ("longbench", options)}


def write_excerpts() -> None:
    """Writes the beginning of each of the eight unseen books, which give an interval over books."""
    books = (DATA / "books" / "valid.jsonl").read_text().splitlines()
    lines = [
        json.dumps({"id": book["id"], "text": book["text"][:EXCERPT_CHARACTERS]})
        for book in map(json.loads, books)
    ]
    EXCERPTS.parent.mkdir(parents=True, exist_ok=True)
    EXCERPTS.write_text("\n".join(lines) + "\n")


def make_run(name: str, seed: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Trains and evaluates one run, except for parts that are finished; its line of results.

    Args:
      name: of the run.
      seed: of its weights and rows.
      only: names of the evaluations that are made; empty: all.
    """
    directory = run_directory(name, seed)
    if not (directory / "results.json").exists():
        options = ["--seed", str(seed), "--run_dir", str(directory)]
        for split in ("train", "valid"):
            options += [f"--data.{split}_paths", str(DATA / "books" / f"{split}.jsonl")]
        config, more = config_of(name)
        command = [
            sys.executable,
            "-m",
            "fwpkm_jax",
            "train",
            f"{CONFIGS}:{config}",
            *options,
            *more,
        ]
        subprocess.run(command, check=True)
    run = load_run(directory)
    subject = subject_of(run, name=str(directory))
    for label, (evaluation, options) in evaluations(name, has_memory=bool(run.memory)).items():
        results = directory / "study" / label
        if (results / f"{evaluation}.json").exists() or not _asked(label, only):
            continue
        began = time.monotonic()
        one, options = _prepared(subject, label, options)
        if evaluation == "ppl":
            one = replace(one, text_paths=(str(EXCERPTS),))
        if label == OTHER:
            words = HAYSTACKS["needle_1x"]
            asked = controls.other_needles(one, words=words, samples=options.samples)
            found = EVALS[evaluation].run(
                one, replace(options, haystack_words=(words,)), samples={words: asked}
            )
            save_result(found, results)
        else:
            run_suite(one, (evaluation,), directory=results, configs={evaluation: options})
        print(f"{directory} {label}: {time.monotonic() - began:.0f} s", flush=True)
    line = {"run": f"{name}:{seed}", "train_loss": round(trained_loss(directory), 5)}
    line |= {label: found for label, found in results_of(directory).items() if _asked(label, only)}
    if _is_gated(name) and _asked("gates", only):
        line["gates"] = controls.gates_at_needles(subject, rows=GATE_ROWS)
    return line


def config_of(name: str) -> tuple[str, list[str]]:
    """The config of a run's name, and what its endings add to the options of `fwpkm train`."""
    options: list[str] = []
    while ending := next((one for one in ENDINGS if name.endswith(one)), None):
        name, options = name.removesuffix(ending), [*ENDINGS[ending], *options]
    return name, options


def _is_gated(name: str) -> bool:
    """Whether a run is of the main model with the paper's gate and one write of a chunk."""
    return config_of(name)[0] == MAIN and UNGATED not in name and REREADING not in name


def _reads_slots(name: str) -> bool:
    """Whether a run has FwPKM, and writes each chunk once."""
    return "fwpkm" in name and REREADING not in name


def _asked(label: str, only: Sequence[str]) -> bool:
    return not only or label in only


def _prepared(subject: Subject, label: str, options: Any) -> tuple[Subject, Any]:
    """What an evaluation reads, if it is not the trained model with the options as they are."""
    if label == WINDOWED:
        return _limited(subject), options
    if label.endswith(STILL):
        return controls.with_still_keys(subject), options
    if label == ABLATED:
        return controls.without_reads(subject), options
    return subject, options


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
    """As NAME:SEED; those that `--out` has are passed over."""
    evaluations: tuple[str, ...] = ()
    """Names of the evaluations to make, as in the lines of `--out`; empty: all of a run."""
    tables: bool = False
    """Only prints the tables of the lines in `--out`."""
    out: Path = Path("lab/results/study_cpu.jsonl")
    """File of the results, which are added to."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    if not (options.tables or EXCERPTS.exists()):
        write_excerpts()
    runs = () if options.tables else options.runs

    def make(name: str, seed: int) -> dict[str, Any]:
        return make_run(name, seed, options.evaluations)

    lines = make_lines(runs, SEEDS, options.out, make)
    print("\n\n".join(tables(lines, domains=DOMAINS, main=MAIN)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
