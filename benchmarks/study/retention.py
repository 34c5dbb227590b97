"""Compares ways to write FwPKM by what a memory keeps of a text while it reads other texts.

    python -m benchmarks.study.study --runs gdn_swa__fwpkm__ungated:0   # and :1, :2
    python -m benchmarks.study.retention

The study's FwPKM models without gates (docs/measurements/study.md) were trained with the plain
write. They read the six domains one after the other, once with each way to write. Steps of half and
a quarter of the size are controls: a way to retain must keep more than these at the same
adaptation. It must not reduce recall either, so the table also has the share of needles answered
after one reading and after four. Runs already in the file are skipped.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.comparison.small_decoders import Results, Row
from benchmarks.machine import environment, settings
from benchmarks.options import parse
from benchmarks.study.study import DATA, DOMAINS, HAYSTACKS
from fwpkm_jax.core.slots.retention import Retention, SlotHistory, init_history
from fwpkm_jax.data import TextData, load_tokenizer
from fwpkm_jax.evaluation import NeedleConfig
from fwpkm_jax.evaluation.continual.domains import Domain, read_domains
from fwpkm_jax.evaluation.continual.evaluate import ContinualConfig, continual_learning
from fwpkm_jax.evaluation.needle.evaluate import needle_accuracy
from fwpkm_jax.evaluation.needle.files import texts_of
from fwpkm_jax.evaluation.readers.whole_pass import row_batches, write_rows
from fwpkm_jax.evaluation.reconfigure import reconfigure
from fwpkm_jax.evaluation.sources import text_sources
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.run import Run, load_run

VARIANTS: dict[str, tuple[float, Retention | None]] = {
    "plain": (1.0, None),
    "step 0.5": (0.5, None),
    "step 0.25": (0.25, None),
    "write_decay 0.02": (1.0, Retention(write_decay=0.02)),
    "write_decay 0.1": (1.0, Retention(write_decay=0.1)),
    "momentum 0.5": (1.0, Retention(momentum=0.5)),
    "step 0.5, momentum 0.5": (0.5, Retention(momentum=0.5)),
    "step 0.1, momentum 0.9": (0.1, Retention(momentum=0.9)),
    "surprise 1": (1.0, Retention(surprise=1.0)),
    "surprise 4": (1.0, Retention(surprise=4.0)),
    "surprise 16": (1.0, Retention(surprise=16.0)),
    "protection 0.5": (1.0, Retention(protection=0.5)),
    "protection 1": (1.0, Retention(protection=1.0)),
    "protection 2": (1.0, Retention(protection=2.0)),
    "step 0.5, surprise 4": (0.5, Retention(surprise=4.0)),
    "step 0.5, protection 1": (0.5, Retention(protection=1.0)),
    "surprise 4, protection 2": (1.0, Retention(surprise=4.0, protection=2.0)),
}
"""By name: a multiple of the plain step size, and the retention of the write."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Reads domains with several ways to write."""

    runs: tuple[Path, ...] = tuple(
        Path(f"runs/study/gdn_swa__fwpkm__ungated_seed{n}") for n in range(3)
    )
    """Run directories of trained models; rows have the folder's name."""
    data: Path = DATA / "domains"
    """Folder that holds one folder per domain."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Ways to write."""
    max_batches: int = 16
    """Batches of 8 rows read of each domain."""
    max_eval_batches: int = 4
    """Batches of each domain to evaluate on."""
    samples: int = 50
    """Haystacks with one question each, about as long as a training row."""
    turns: int = 10
    """Timed turns of each way to write; the fastest is reported."""
    out: Path = Path("benchmarks/results/retention_cpu.json")
    """File of the results; an existing file is continued."""


def written_so(run: Run, variant: str) -> tuple[LanguageModel, Memory]:
    """A run's model with another way to write, and its memory with the history that this needs."""
    step, retention = VARIANTS[variant]
    config = run.model.config
    rule = config.fast_weight.rule
    assert isinstance(rule, FwPKM)
    assert rule.value_step is None
    rule = replace(rule, value_step=step * rule.num_heads * rule.top_k, retention=retention)
    fast_weight = replace(config.fast_weight, rule=rule)

    def history(values: jax.Array) -> SlotHistory | None:
        if retention is None:
            return None
        return jax.vmap(functools.partial(init_history, retention))(values)

    memory = {name: m._replace(history=history(m.values)) for name, m in run.memory.items()}
    return reconfigure(run.model, replace(config, fast_weight=fast_weight)), memory


def measure(model: LanguageModel, memory: Memory, domains: list[Domain], options: Options) -> Row:
    """The change of each domain's loss, right after it was read and after all were read."""
    config = ContinualConfig(
        max_batches=options.max_batches, max_eval_batches=options.max_eval_batches
    )
    results = continual_learning(model, memory, config=config, domains=domains).record["results"]
    changes = np.asarray(results["loss"]) - results["loss"][0]
    own, end = np.diagonal(changes[1:]).tolist(), changes[-1].tolist()
    means = {name: results[name] for name in ("adaptation", "forgetting", "unseen")}
    means["at_the_end"] = float(np.mean(end))
    return {
        **{name: round(mean, 5) for name, mean in means.items()},
        "own": [round(change, 4) for change in own],
        "end": [round(change, 4) for change in end],
    }


def needles(run: Run, variant: str, text: TextData, options: Options) -> Row:
    """Share of needles answered with all digits right, after one reading and after four."""
    model, memory = written_so(run, variant)
    tokenizer = load_tokenizer(text.tokenizer)
    sources = text_sources(text, ())
    found = needle_accuracy(
        model,
        memory,
        config=NeedleConfig(
            haystack_words=(HAYSTACKS["needle_1x"],), readings=(1, 4), samples=options.samples
        ),
        texts=lambda: texts_of(sources, tokenizer),
        tokenizer=tokenizer,
    )
    runs = found.record["results"]["runs"]
    return {f"readings_{run['readings']}": run["exact"]["accuracy"] for run in runs}


def costs(run: Run, tokens: np.ndarray, options: Options) -> list[Row]:
    """Time of each variant to read and write a batch, and its bytes beyond the plain write's."""
    prepared = {}
    for name in options.variants:
        model, memory = written_so(run, name)
        prepared[name] = [*nnx.split(model), jax.tree.map(jnp.copy, memory)]
    best = dict.fromkeys(prepared, float("inf"))
    for turn in range(options.turns + 1):
        for name, (graphdef, params, memory) in prepared.items():
            began = time.perf_counter()
            memory, _ = write_rows(graphdef, params, memory, tokens, fast_weight_dtype="float32")
            jax.block_until_ready(memory)
            if turn:  # The first turn compiles.
                best[name] = min(best[name], time.perf_counter() - began)
            prepared[name][2] = memory
    rows = []
    for name, (_, _, memory) in prepared.items():
        history = jax.tree.leaves({layer: m.history for layer, m in memory.items()})
        row = {"cost_of": name, "milliseconds_per_batch": round(1e3 * best[name], 2)}
        rows.append({**row, "history_bytes": sum(leaf.nbytes for leaf in history)})
    return rows


def table(rows: list[Row]) -> str:
    """Means over the runs of each variant, and the number of runs below the plain write."""
    lines = [
        "| write | adaptation | at the end | forgetting | unseen | needles, 1 and 4 readings "
        "| ms per batch | more bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    costs = {row["cost_of"]: row for row in rows if "cost_of" in row}
    read = [row for row in rows if "read_by" in row]
    rows = [row for row in rows if "variant" in row]
    plain = {row["run"]: row for row in rows if row["variant"] == "plain"}
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        cells = [name]
        for key in ("adaptation", "at_the_end", "forgetting", "unseen"):
            below = sum(row[key] < plain[row["run"]][key] for row in own)
            count = "" if name == "plain" else f" ({below} of {len(own)})"
            cells.append(f"{np.mean([row[key] for row in own]):.4f}{count}")
        told = [
            [row[key] for row in read if row["read_by"] == name]
            for key in ("readings_1", "readings_4")
        ]
        cells.append(", ".join(f"{np.mean(shares):.2f}" for shares in told if shares))
        cost = costs.get(name, {"milliseconds_per_batch": "", "history_bytes": ""})
        cells += [str(cost["milliseconds_per_batch"]), str(cost["history_bytes"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the results lack, and prints the table of all results."""
    options = parse(Options, argv, description=__doc__)
    chosen: Any = replace(options, runs=(), variants=())  # These may differ between calls.
    results = Results(options.out, settings=settings(chosen), machine=environment)
    for path in options.runs:
        variants = [v for v in options.variants if not results.has(run=path.name, variant=v)]
        unread = [v for v in options.variants if not results.has(run=path.name, read_by=v)]
        uncosted = not all(results.has(cost_of=name) for name in options.variants)
        if not (variants or unread or uncosted):
            continue
        run = load_run(path)
        text = run.experiment.data
        assert isinstance(text, TextData)
        domains = read_domains([f"{d}={options.data / d}" for d in DOMAINS], text)
        for name in variants:
            row = measure(*written_so(run, name), domains, options)
            results.add({"run": path.name, "variant": name, **row})
            print(f"{path.name} {name}: {row}", flush=True)
            jax.clear_caches()
        for name in unread:
            row = needles(run, name, text, options)
            results.add({"run": path.name, "read_by": name, **row})
            print(f"{path.name} {name}: {row}", flush=True)
            jax.clear_caches()
        if uncosted:
            part = domains[0].adapt
            batches = row_batches(part.rows, part.indices, batch_size=8, keep_last=False)
            for row in costs(run, next(batches), options):
                results.add(row)
    print(table(results.content["rows"]))


if __name__ == "__main__":
    main()
