"""Measures state tracking of every matrix memory: parity, sums modulo 3, permutations of three.

    taskset -c 1 python -m benchmarks.comparison.state_tracking
    python -m benchmarks.comparison.tables

Each decoder has one layer with the memory and no convolution; learned decays start close to none.
Decoders are trained on short documents with a label at every token, and evaluated on longer ones.
Delta rules run twice, with write strengths up to 1 and up to 2 (`negative_eigenvalues`). Runs
already in the file are skipped.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import jax
import numpy as np

from benchmarks.comparison.small_decoders import (
    Batch,
    Results,
    Row,
    Trained,
    Trainer,
    cpu_seconds,
    state_bytes,
    without_decay,
)
from benchmarks.machine import environment, settings
from benchmarks.options import parse
from fwpkm_jax.data.recall import Split
from fwpkm_jax.data.state_tracking import Group, StateTrackingData, StateTrackingSource
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules.matrix import MATRIX_RULES, AbstractMatrixRule

WIDTH = 32
"""Width of the residual stream."""
VOCABULARY = max(StateTrackingData(group=group).vocab_size for group in get_args(Group))
"""Token ids; the same number for all tasks, so that one compiled program trains them all."""


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
    out: Path = Path("benchmarks/results/state_tracking_cpu.json")
    """File of the results; an existing file is continued."""


def decoder(name: str, options: Options) -> ModelConfig:
    """The decoder of one memory."""
    sizes = {"num_key_heads": options.heads, "num_value_heads": options.heads}
    sizes |= dict.fromkeys(("key_head_dim", "value_head_dim"), options.head_dim)
    sizes["decay_start"] = "constant"  # `without_decay` replaces it.
    return ModelConfig(
        vocab_size=VOCABULARY,
        model_dim=WIDTH,
        mixers=(name.rstrip("+"),),
        mlp_dim=2 * WIDTH,
        matrix=MatrixMemoryConfig(**sizes, rules=(RULES[name],)),
        tie_embeddings=False,
        head_bias=True,
        head_init_std=0.0,
        init_std=0.1,
        activation_dtype="float32",
    )


def batch(source: StateTrackingSource, first: int, count: int) -> Batch:
    """`count` documents stacked to one batch."""
    documents = [source[index] for index in range(first, first + count)]
    tokens, labels = (np.stack([one[name] for one in documents]) for name in ("tokens", "labels"))
    return {"tokens": tokens, "labels": labels, "weights": np.ones(tokens.shape, np.float32)}


def source_of(group: Group, split: Split, length: int, seed: int) -> StateTrackingSource:
    """The documents of one split."""
    return StateTrackingSource(
        StateTrackingData(group=group, length=length), split=split, seed=seed
    )


def spans(trained: Trained, group: Group, options: Options, seed: int) -> list[Row]:
    """Share of right labels in each range of positions, on documents that were not in training."""
    source = source_of(group, "valid", max(options.ends), seed)
    right = np.asarray(trained.right(batch(source, 0, options.documents)))
    return [
        {"above": start, "up_to": end, "accuracy": round(float(right[:, start:end].mean()), 4)}
        for start, end in itertools.pairwise((0, *options.ends))
    ]


def measure(name: str, options: Options, results: Results) -> None:
    """Trains and evaluates one memory for the runs that the results lack."""
    runs = [
        (group, seed)
        for group, seed in itertools.product(options.groups, options.seeds)
        if not results.has(rule=name, group=group, seed=seed)
    ]
    if not runs:
        return
    config = decoder(name, options)
    trainer = Trainer(config, learning_rate=options.learning_rate, steps=options.steps)
    for group, seed in runs:
        start = cpu_seconds()
        source = source_of(group, "train", options.length, seed)
        size = options.batch_size
        batches = (batch(source, size * step, size) for step in range(options.steps))
        trained = trainer.train(batches, seed=seed, prepare=without_decay)
        row = {"rule": name, "group": group, "seed": seed}
        row |= {"state_bytes": state_bytes(config, length=options.length)}
        row |= {"parameters": trained.parameters, "loss": round(trained.loss, 4)}
        row["spans"] = spans(trained, group, options, seed)
        row["cpu_seconds"] = cpu_seconds(start)
        results.add(row)
        shown = " ".join(f"..{span['up_to']}: {span['accuracy']:.2f}" for span in row["spans"])
        print(f"{group} {name} seed {seed} {row['cpu_seconds']:.0f} s: {shown}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the results lack, one memory after the other."""
    options = parse(Options, argv, description=__doc__)
    chosen = replace(options, rules=(), groups=(), seeds=())  # These may differ between calls.
    results = Results(options.out, settings=settings(chosen), machine=environment)
    for name in options.rules:
        measure(name, options, results)
        jax.clear_caches()


if __name__ == "__main__":
    main()
