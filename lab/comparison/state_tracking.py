"""Measures state tracking of every matrix memory: parity, sums, permutations.

    taskset -c 1 python -m lab.comparison.state_tracking
    python -m lab.comparison.tables

Each decoder has one layer with the memory and no convolution; learned decays start close to none.
Decoders are trained on short documents with a label at every token, and evaluated on longer ones.
Delta rules run twice, with write strengths up to 1 and up to 2 (`negative_eigenvalues`). Every run
is a line of `out` with its settings; runs already in the file are skipped. The published sizes are
options, see lab/archive/state_tracking.md.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.machine import environment_once, settings
from benchmarks.options import parse
from fwpkm_jax.data.recall import Split
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.rules.matrix import MATRIX_RULES, AbstractMatrixRule
from fwpkm_jax.rules.matrix.deltaproduct import DeltaProduct
from lab.comparison.small_decoders import (
    Batch,
    Lines,
    Row,
    Trained,
    Training,
    cpu_seconds,
    state_bytes,
    without_decay,
)
from lab.comparison.state_tracking_data import Group, StateTrackingData, StateTrackingSource

SMALLEST = 6
"""Ids that every decoder has at least: those of s3."""
FWPKM = "fwpkm"
"""The name of a memory layer, written at every token, below attention that sees that token alone;
no run by default."""


def variants() -> dict[str, AbstractMatrixRule]:
    """Every rule by name; rules whose write strength can reach 2 come twice, marked by `+`."""
    found = dict[str, AbstractMatrixRule]()
    for name, kind in MATRIX_RULES.items():
        rule = replace(kind(), convolution=False, chunk_size=32)
        if hasattr(rule, "negative_eigenvalues"):
            found[name] = replace(rule, **{"negative_eigenvalues": False})
            found[f"{name}+"] = replace(rule, **{"negative_eigenvalues": True})
        else:
            found[name] = rule
    return found


RULES = variants()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates small decoders."""

    rules: tuple[str, ...] = tuple(RULES)
    """Names of the memories; + marks write strengths up to 2."""
    groups: tuple[Group, ...] = ("parity", "mod3", "s3")
    """Groups whose products are tracked."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and documents; all memories see the same documents."""
    length: int = 32
    """Tokens of a training document."""
    ends: tuple[int, ...] = (32, 64, 128, 256)
    """Ends of the ranges of tokens for which accuracy is reported."""
    steps: int = 500
    """Training steps."""
    batch_size: int = 32
    """Documents per step."""
    learning_rate: float = 1e-2
    """Peak learning rate."""
    documents: int = 64
    """Documents evaluated per seed."""
    heads: int = 2
    """Heads, each with its own memory."""
    head_dim: int = 16
    """Width of keys and values."""
    layers: int = 1
    """Layers, each with a memory and an MLP of twice the width."""
    width: int = 32
    """Width of the residual stream."""
    convolution: bool = False
    """Gives the memories a short convolution."""
    start_token: bool = False
    """Puts a token without a label before every document."""
    weight_decay: float = 0.01
    """Weight decay of the optimiser."""
    delta_steps: int = 2
    """Steps per token of DeltaProduct."""
    out: Path = Path("lab/results/state_tracking_cpu.jsonl")
    """File of the results; an existing file is continued."""


def decoder(name: str, options: Options, *, vocabulary: int = SMALLEST) -> ModelConfig:
    """The decoder of one memory."""
    parts = _memory_layer(options) if name == FWPKM else _mixers(name, options)
    return ModelConfig(
        vocab_size=vocabulary,
        model_dim=options.width,
        mlp_dim=2 * options.width,
        tie_embeddings=False,
        head_bias=True,
        head_init_std=0.0,
        init_std=0.1,
        activation_dtype="float32",
        **parts,
    )


def _mixers(name: str, options: Options) -> dict[str, Any]:
    rule = replace(RULES[name], convolution=options.convolution)
    if isinstance(rule, DeltaProduct):
        rule = replace(rule, num_steps=options.delta_steps)
    return {
        "mixers": (name.rstrip("+"),) * options.layers,
        # `without_decay` replaces the start of the decays.
        "matrix": MatrixMemoryConfig(
            num_key_heads=options.heads,
            num_value_heads=options.heads,
            key_head_dim=options.head_dim,
            value_head_dim=options.head_dim,
            decay_start="constant",
            rules=(rule,),
        ),
    }


def _memory_layer(options: Options) -> dict[str, Any]:
    """FwPKM with one table of as many numbers as the tables of `sdm_heads` have together."""
    width = options.heads * options.head_dim
    rows = options.head_dim // 2
    rule = FwPKM(num_subkeys=rows, key_dim=width, value_dim=width, lookahead=0)
    return {
        "mixers": ("swa",) * options.layers,
        "window": 1,
        "memory_layers": tuple(range(options.layers)),
        "fast_weight": FastWeightConfig(rule=rule, chunk_size=1, gate_bias=2.0),
    }


def num_ids(group: Group, options: Options) -> int:
    """Token ids of a group's decoder; the last one is the start token, if there is one."""
    return max(SMALLEST, StateTrackingData(group=group).vocab_size + options.start_token)


def batch(source: StateTrackingSource, first: int, count: int, start: int | None = None) -> Batch:
    """`count` documents stacked to one batch; with a `start` token each begins with it."""
    documents = [source[index] for index in range(first, first + count)]
    tokens, labels = (np.stack([one[name] for one in documents]) for name in ("tokens", "labels"))
    weights = np.ones(tokens.shape, np.float32)
    if start is not None:
        tokens, labels, weights = (
            np.pad(x, ((0, 0), (1, 0)), constant_values=value)
            for x, value in ((tokens, start), (labels, 0), (weights, 0))
        )
    return {"tokens": tokens, "labels": labels, "weights": weights}


def source_of(group: Group, split: Split, length: int, seed: int) -> StateTrackingSource:
    """The documents of one split."""
    data = StateTrackingData(group=group, length=length)
    return StateTrackingSource(data, split=split, seed=seed)


def spans(trained: Trained, group: Group, options: Options, seed: int) -> list[Row]:
    """Share of right labels in each range of positions, on documents that were not in training."""
    source = source_of(group, "valid", max(options.ends), seed)
    start = num_ids(group, options) - 1 if options.start_token else None
    right = np.asarray(trained.right(batch(source, 0, options.documents, start)))
    right = right if start is None else right[:, 1:]
    return [
        {"above": above, "up_to": end, "accuracy": round(float(right[:, above:end].mean()), 4)}
        for above, end in itertools.pairwise((0, *options.ends))
    ]


def measure(name: str, group: Group, options: Options, lines: Lines) -> None:
    """Trains and evaluates one memory on one group for the seeds that the file lacks."""
    about = settings(replace(options, rules=(), groups=(), seeds=()))
    about = {key: value for key, value in about.items() if key not in ("rules", "groups", "seeds")}
    about = json.loads(json.dumps(about)) | {"every_value": False}  # As lines have it.
    key = {"rule": name, "group": group, "settings": about}
    seeds = [seed for seed in options.seeds if not lines.find(seed=seed, **key)]
    if not seeds:
        return
    ids = num_ids(group, options)
    config = decoder(name, options, vocabulary=ids)
    training = Training(
        config,
        learning_rate=options.learning_rate,
        steps=options.steps,
        weight_decay=options.weight_decay,
    )
    first, size = ids - 1 if options.start_token else None, options.batch_size
    for seed in seeds:
        start = cpu_seconds()
        source = source_of(group, "train", options.length, seed)
        batches = (batch(source, size * step, size, first) for step in range(options.steps))
        trained = training.train(batches, seed=seed, prepare=without_decay)
        row = key | {"seed": seed}
        row |= {"state_bytes": options.layers * state_bytes(config)}
        row |= {"parameters": trained.parameters, "loss": round(trained.loss, 4)}
        row["spans"] = spans(trained, group, options, seed)
        row["curve"] = [round(loss, 4) for loss in trained.curve]
        row["cpu_seconds"] = cpu_seconds(start)
        lines.add(row | {"environment": environment_once()})
        shown = " ".join(f"..{span['up_to']}: {span['accuracy']}" for span in row["spans"])
        print(f"{group} {name} seed {seed} {row['cpu_seconds']:.0f} s: {shown}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the results lack, one memory after the other."""
    options = parse(Options, argv, description=__doc__)
    lines = Lines(options.out)
    for name, group in itertools.product(options.rules, options.groups):
        measure(name, group, options, lines)
        jax.clear_caches()


if __name__ == "__main__":
    main()
