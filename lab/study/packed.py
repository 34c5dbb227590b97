"""Trains on rows of several short documents, with and without resets, and reads new documents.

    python -m lab.study.packed                     # what is missing in --out, then its table
    python -m lab.study.packed --runs document:0   # one of them, KIND:SEED

The page of results is docs/measurements/study.md. The documents are passages of books in random
order, written to `--runs-dir` first. Every run trains on the same rows; those with resets also get
the segment ids. Finished runs are skipped, and an interrupted one continues. `--out` gets one JSON
object per line and run.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.options import parse
from fwpkm_jax.data import make_dataset
from fwpkm_jax.evaluation.intervals import clustered_mean
from fwpkm_jax.run.load import Run, load_run
from fwpkm_jax.training.micro_batches import broadcast_memory
from lab.study.lines import make_lines, train_run

RESETS, JOINED = ("--data.packing", "documents"), ("--data.packing", "concat")
KEEPS = ("--model.gdn.decay_start", "time_steps")
EACH = ("--model.fast_weight.documents", "document", "--training.memory.lifetime", "batch")
KINDS: dict[str, tuple[str, ...]] = {
    "backbone_resets": ("study/gdn_swa", *RESETS),
    "backbone_joined": ("study/gdn_swa", *JOINED),
    "keeping_resets": ("study/gdn_swa", *RESETS, *KEEPS),
    "keeping_joined": ("study/gdn_swa", *JOINED, *KEEPS),
    "carry": ("study/gdn_swa__fwpkm", *RESETS),
    "document": ("study/gdn_swa__fwpkm", *RESETS, *EACH),
    "fwpkm_joined": ("study/gdn_swa__fwpkm", *JOINED),
}
"""Configuration and options of each kind of run. The study's Gated DeltaNet forgets within a few
bytes; that of `keeping` keeps most of its memory at the start."""
READINGS = ("alone", "resets", "joined")
"""How an evaluation lays out documents: each in a row of its own; in rows of several with segment
ids; in the same rows without."""
PARTS = ("start", "rest")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates each kind of run."""

    runs: tuple[str, ...] = tuple(f"{kind}:{seed}" for seed in range(3) for kind in KINDS)
    """As KIND:SEED, in this order."""
    extra: tuple[str, ...] = ()
    """More options of `fwpkm train` for every run, as NAME=VALUES without dashes."""
    steps: int = 150
    """Steps of each run."""
    batch: int = 4
    """Rows of a step; each has a memory of its own."""
    characters: tuple[int, ...] = (40, 400)
    """Least and greatest size of a document, between which the logarithm is even."""
    documents: tuple[int, ...] = (20_000, 600)
    """Documents for training and for evaluation."""
    start: int = 64
    """Bytes that count as the start of a document."""
    data: Path = Path("../shared/data/books")
    """Folder of train.jsonl and valid.jsonl."""
    runs_dir: Path = Path("runs/study/packed")
    """Folder of the documents and of the runs."""
    out: Path = Path("lab/results/packed_cpu.jsonl")
    """File of the results, which are added to."""


def write_documents(options: Options) -> None:
    """Cuts books into passages that end with a word, and writes some in random order."""
    least, greatest = options.characters
    for split, count in zip(("train", "valid"), options.documents, strict=True):
        path = options.runs_dir / f"{split}.jsonl"
        if path.exists():
            continue
        rng = np.random.default_rng(0)
        passages = []
        for line in (options.data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            text, at = json.loads(line)["text"], 0
            while at < len(text) - greatest:
                size = math.exp(rng.uniform(math.log(least), math.log(greatest)))
                end = text.rfind(" ", at, at + int(size)) + 1 or at + int(size)
                passages.append(text[at:end].strip())
                at = end
        chosen = rng.permutation(len(passages))[:count]
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"id": str(i), "text": passages[i]}) + "\n" for i in chosen]
        whole = path.with_suffix(".part")
        whole.write_text("".join(lines), encoding="utf-8")
        whole.replace(path)


def directory_of(options: Options, kind: str, seed: int) -> Path:
    return options.runs_dir / f"{kind}_seed{seed}"


def train(options: Options, kind: str, seed: int) -> None:
    """Trains a run, or what is left of it."""
    config, *settings = KINDS[kind]
    command = [config, "--data.needles", "None", *settings, "--training.steps", str(options.steps)]
    for name in ("training.batch_size", "training.memory.groups"):
        command += [f"--{name}", str(options.batch)]
    command += ["--training.validation_batches", "0", "--optimizer.warmup_steps", "20"]
    directory, text = directory_of(options, kind, seed), options.runs_dir
    train_run(directory, command, seed=seed, text=text, extra=options.extra)


class Places(NamedTuple):
    """Documents in rows. A label is the byte after its place."""

    tokens: np.ndarray
    """int32 `[rows, length + 1]`."""
    ids: np.ndarray
    """int32 `[rows, length]`, the document of each input in its row, from 1 on; 0 for padding."""
    position: np.ndarray
    """int32 `[rows, length]`, the label's place in its document; 0 where it is not scored."""


def in_rows(tokens: np.ndarray, ids: np.ndarray, weight: np.ndarray) -> Places:
    """Rows in which every document but the first, of which a part may be missing, is scored."""
    columns = np.arange(ids.shape[1])
    begins = np.concatenate([np.ones_like(ids[:, :1]), np.diff(ids, axis=1)], axis=1) != 0
    first = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    position = np.where((ids > 1) & (weight > 0), columns - first + 1, 0)
    return Places(tokens, ids, position)


def each_alone(rows: Places) -> Places:
    """The scored documents of `rows`, each with its own row."""
    found = [
        (row, inside := np.flatnonzero(rows.ids[row] == number))
        for row in range(len(rows.ids))
        for number in range(2, rows.ids[row].max() + 1)
    ]
    length = max(len(inside) for _, inside in found)
    tokens = np.zeros((len(found), length + 1), np.int32)
    ids, position = np.zeros((2, len(found), length), np.int32)
    for place, (row, inside) in enumerate(found):
        tokens[place, : len(inside) + 1] = rows.tokens[row, inside[0] : inside[-1] + 2]
        ids[place, : len(inside)] = 1
        position[place, : len(inside)] = rows.position[row, inside]
    return Places(tokens, ids, position)


def evaluate(options: Options, kind: str, seed: int) -> dict[str, Any]:
    """The line of a trained run: loss in nats of starts and of the rest, by layout."""
    run = load_run(directory_of(options, kind, seed))
    data = replace(run.experiment.data, packing="documents")
    batches = list(make_dataset(data, split="valid", batch_size=options.batch, seed=0))
    names = ("tokens", "segment_ids", "loss_weight")
    rows = in_rows(*(np.concatenate([batch[name] for batch in batches]) for name in names))
    alone = each_alone(rows)
    readings = {"alone": alone, "resets": rows}
    readings["joined"] = rows._replace(ids=np.minimum(rows.ids, 1))
    line: dict[str, Any] = {
        "run": f"{kind}:{seed}",
        "steps": run.experiment.training.steps,
        "documents": len(alone.ids),
    }
    for name, places in readings.items():
        losses = losses_of(run, places, carry=name != "alone")
        for part, scored in zip(PARTS, parts_of(places, start=options.start), strict=True):
            line[f"{name}_{part}"] = float(losses[scored].mean())
            line[f"{part}_bytes"] = int(scored.sum())
    return line


def parts_of(places: Places, *, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Where labels are among the first `start` bytes of their documents, and where later."""
    scored = places.position > 0
    return scored & (places.position < start), scored & (places.position >= start)


def losses_of(run: Run, places: Places, *, carry: bool) -> np.ndarray:
    """The loss of every label, float32 `[rows, length]`.

    With `carry`, a memory that the run carries from batch to batch is carried here as well.
    """
    groups = run.experiment.training.memory.groups
    memory = run.memory
    if run.experiment.training.memory.lifetime == "batch":
        memory, carry = broadcast_memory(memory, groups), False

    @jax.jit
    def read(params: Any, memory: Any, tokens: jax.Array, ids: jax.Array) -> tuple[Any, jax.Array]:
        out = nnx.merge(run.graphdef, params)(tokens[:, :-1], memory, segment_ids=ids)
        losses = optax.softmax_cross_entropy_with_integer_labels(out.logits, tokens[:, 1:])
        return out.memory, losses

    found = []
    for tokens, ids in _batches(places, groups):
        written, losses = read(run.params, memory, tokens, ids)
        memory = written if carry else memory
        found.append(np.asarray(losses))
    return np.concatenate(found)[: len(places.tokens)]


def _batches(places: Places, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and ids of `size` rows at a time, the last ones filled with padding."""
    for at in range(0, len(places.tokens), size):
        tokens, ids = places.tokens[at : at + size], places.ids[at : at + size]
        missing = ((0, size - len(tokens)), (0, 0))
        yield np.pad(tokens, missing), np.pad(ids, missing)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Perplexities of each kind, means over its seeds, by layout of the documents."""
    head = ["trained", "seeds", *(f"{part}, {name}" for part in PARTS for name in READINGS)]
    rows = [head, ["---"] * len(head)]
    for kind in KINDS:
        own = [line for line in lines if line["run"].split(":")[0] == kind]
        if own:
            means = [_mean(own, f"{name}_{part}") for part in PARTS for name in READINGS]
            rows.append([kind, str(len(own)), *(f"{math.exp(mean):.3f}" for mean in means)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([line[name] for line in lines]))


def differences(lines: Sequence[dict[str, Any]]) -> str:
    """Loss of one kind minus that of another, in nats, seed by seed."""
    by_run = {line["run"]: line for line in lines}
    pairs = (
        ("backbone_joined", "backbone_resets"),
        ("keeping_joined", "keeping_resets"),
        ("fwpkm_joined", "carry"),
        ("carry", "backbone_resets"),
        ("document", "backbone_resets"),
    )
    columns = [f"{name}_{part}" for part in PARTS for name in ("alone", "resets")]
    heads = [f"{part}, {name}" for part in PARTS for name in ("alone", "resets")]
    rows = [["difference, nats", "seeds", *heads], ["---"] * (2 + len(columns))]
    for one, other in pairs:
        seeds = [run.split(":")[1] for run in by_run if run.startswith(f"{one}:")]
        seeds = [seed for seed in seeds if f"{other}:{seed}" in by_run]
        if not seeds:
            continue
        cells = []
        for column in columns:
            values = [by_run[f"{one}:{x}"][column] - by_run[f"{other}:{x}"][column] for x in seeds]
            mean, interval = clustered_mean(np.asarray(values), np.ones(len(values)))
            bounds = "" if interval is None else " [{:+.3f}, {:+.3f}]".format(*interval)
            cells.append(f"{mean:+.3f}{bounds}")
        rows.append([f"{one} minus {other}", str(len(seeds)), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)

    def make(kind: str, seed: int) -> dict[str, Any]:
        write_documents(options)
        train(options, kind, seed)
        return evaluate(options, kind, seed)

    lines = make_lines(options.runs, KINDS, options.out, make)
    print(table(lines))
    print(differences(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
