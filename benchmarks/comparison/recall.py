"""Measures associative recall by pairs, length and state size, with equal state for all memories.

    taskset -c 1 python -m benchmarks.comparison.recall
    python -m benchmarks.comparison.tables

Each decoder has one layer with the memory. A pair is a key token and the value token after it, so
a memory must combine two tokens. FwPKM and FwMLP look ahead by one token. Matrix memories have a
short convolution that starts as a shift of the keys by one token (`bind`). The others follow a
layer of windowed attention. Decoders are trained on documents of one length with several numbers
of pairs, and evaluated at every length. Runs already in the file are skipped, so the program can
be stopped and started again at any time.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.comparison.small_decoders import (
    Batch,
    Results,
    Row,
    Trained,
    Trainer,
    cpu_seconds,
    state_bytes,
    widest,
    without_decay,
)
from benchmarks.machine import environment, settings
from benchmarks.options import parse
from fwpkm_jax.data.recall import Example, RecallData, RecallSource
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.lact import LaCTConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig
from fwpkm_jax.layers.mixers.titans import TitansConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import FwMLP, FwPKM
from fwpkm_jax.rules.matrix import MATRIX_RULES

CHUNK = 32
"""Tokens between two writes of chunked memories; answers are at least as far from their pair."""
WIDTH = 32
"""Width of the residual stream."""
UNBOUNDED = ("fwpkm_table", "attention")
"""Not limited to a state size: full attention as the upper bound, and FwPKM with a large table."""
TABLE = FwPKM(num_subkeys=32, key_dim=16, value_dim=16, top_k=8)
NAMES = (*MATRIX_RULES, "fwmlp", "fwpkm", *UNBOUNDED, "titans", "lact")
VALUES = 32
"""Number of different values; a guess is right with probability 1 / VALUES."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates small decoders."""

    rules: tuple[str, ...] = NAMES
    """Names of the memories."""
    budgets: tuple[int, ...] = (1024, 4096, 256)
    """Bytes of state per sequence; each memory gets the largest width that fits."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and documents; all memories see the same documents."""
    length: int = 128
    """Tokens of a training document."""
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Numbers of pairs in a document; at most `questions` of them are asked for."""
    lengths: tuple[int, ...] = (128, 256)
    """Lengths of the evaluated documents."""
    questions: int = 8
    """Most questions in a document."""
    steps: int = 400
    """Training steps."""
    easy_steps: int = 200
    """The first steps, in which documents have the two smallest numbers of pairs."""
    batch_size: int = 16
    """Documents per step."""
    learning_rate: float = 5e-3
    """Peak learning rate."""
    documents: int = 64
    """Documents evaluated per cell and seed."""
    out: Path = Path("benchmarks/results/recall_cpu.json")
    """File of the results; an existing file is continued."""


def task(pairs: int, length: int, options: Options) -> RecallData | None:
    """The task with that many pairs, or None if they do not fit the length."""
    questions = min(pairs, options.questions)
    if 2 * (pairs + questions) + CHUNK - 3 > length:
        return None
    return RecallData(
        length=length,
        num_facts=pairs,
        num_questions=questions,
        num_keys=max(options.pairs),
        num_values=VALUES,
        num_filler=16,
        min_distance=CHUNK,
    )


def decoder(name: str, size: int) -> ModelConfig:
    """The decoder of one memory; `size` is its width, for `fwpkm` its number of sub-keys."""
    mixers, changes = ("swa",), dict[str, Any]()
    if name in MATRIX_RULES:
        mixers = (name,)
        rule = replace(MATRIX_RULES[name](), convolution=True, chunk_size=CHUNK)
        changes["matrix"] = MatrixMemoryConfig(
            **dict.fromkeys(("num_key_heads", "num_value_heads"), 1),
            **dict.fromkeys(("key_head_dim", "value_head_dim"), size),
            decay_start="constant",  # `without_decay` replaces it.
            rules=(rule,),
        )
    elif name == "titans":
        mixers = ("swa", name)
        changes["titans"] = TitansConfig(num_heads=2, head_dim=size, depth=1, chunk_size=CHUNK // 2)
    elif name == "lact":
        mixers = ("swa", name)
        changes["lact"] = LaCTConfig(
            num_heads=1, num_fast_heads=2, hidden_dim=size, chunk_size=CHUNK, window=4
        )
    elif name == "attention":
        mixers = ("swa", name)
    else:
        rule: FwPKM | FwMLP = TABLE
        if name == "fwpkm":
            rule = FwPKM(num_subkeys=size, key_dim=8, value_dim=8, top_k=min(8, size))
        if name == "fwmlp":
            rule = FwMLP(key_dim=16, value_dim=16, hidden_dim=size)
        changes["memory_layers"] = (0,)
        # Without gates, as the stored results were made; what a gate does depends on the start
        # (docs/measurements/results.md).
        changes["fast_weight"] = FastWeightConfig(
            rule=rule, chunk_size=CHUNK, gate_output=False, weight_by_gate=False
        )
    return ModelConfig(
        vocab_size=1,
        model_dim=WIDTH,
        mixers=mixers,
        window=2,
        mlp_dim=2 * WIDTH,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16, rotary_fraction=0.5),
        init_std=0.15,
        activation_dtype="float32",
        **changes,
    )


def bind(params: Any, config: ModelConfig) -> Any:
    """Changes the initial parameters so that a matrix memory binds pairs as FwPKM does by design.

    Keys come from the previous token, and queries have the projection of the keys. A token's value
    is therefore written under the previous token, and the same token retrieves it. Learned decays
    start close to no decay, as FwPKM has none. Of several writes per token the first starts with
    nearly all strength. Training can change all of this.
    """
    mixer = params["blocks"][0]["mixer"]
    if config.mixers[0] in MATRIX_RULES:
        weight = np.zeros(mixer["conv_weight"][...].shape, np.float32)
        width, steps = config.matrix.key_head_dim, config.matrix.rule(config.mixers[0]).steps
        keys = slice(width, width * (1 + steps))
        weight[-1] = 1.0
        weight[-1, keys], weight[-2, keys] = 0.0, 1.0
        mixer["conv_weight"][...] = jnp.asarray(weight)
        kernel = mixer["in_proj"]["kernel"][...]
        made_alike = kernel.at[:, :width].set(kernel[:, width : 2 * width])
        mixer["in_proj"]["kernel"][...] = made_alike
        if steps > 1:
            bias = mixer["strength_proj"]["bias"]
            bias[...] = bias[...].at[1:].set(-4.0)
    return without_decay(params, config)


def sized(name: str, budget: int | None, *, length: int) -> ModelConfig | None:
    """The decoder with the largest memory within `budget` bytes; None if none is that small."""
    if budget is None:
        return decoder(name, 0)
    size = widest(lambda n: state_bytes(decoder(name, n), length=length) <= budget, most=64)
    return None if size is None else decoder(name, size)


def touched_bytes(config: ModelConfig, total: int) -> tuple[int, int]:
    """Bytes of state that one token touches: of values alone, and including scored keys.

    A matrix or a network is read as a whole. FwPKM scores all its sub-keys and reads the chosen
    slots.
    """
    rule = config.fast_weight.rule
    if not (config.memory_layers and isinstance(rule, FwPKM)):
        return total, total
    slots = 4 * rule.num_heads * rule.top_k * rule.value_dim
    return slots, slots + 4 * rule.num_heads * rule.num_subkeys * rule.key_dim


def examples(data: RecallData, split: Any, seed: int) -> Iterator[Example]:
    """The documents of a task."""
    source = RecallSource(data, split=split, seed=seed)
    return (source[index] for index in itertools.count())


def batch(documents: list[Example]) -> Batch:
    """Stacks documents to one batch."""
    tokens = np.stack([document["tokens"] for document in documents])
    weights = np.stack([document["loss_weight"] for document in documents])
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}


def training_batches(options: Options, seed: int) -> list[Batch]:
    """Batches whose documents cycle through the numbers of pairs that fit the training length.

    The first batches have few pairs: if the state is too small for most questions, the model does
    not learn to answer the others either.
    """
    tasks = [task(pairs, options.length, options) for pairs in options.pairs]
    streams = [examples(data, "train", seed) for data in tasks if data]
    turns = [itertools.cycle(streams[:2]), itertools.cycle(streams)]
    return [
        batch([next(next(turns[step >= options.easy_steps])) for _ in range(options.batch_size)])
        for step in range(options.steps)
    ]


def cells(trained: Trained, options: Options, seed: int) -> list[Row]:
    """Share of right answers by pairs and length, on documents that were not in training."""
    rows = []
    for length, pairs in itertools.product(options.lengths, options.pairs):
        data = task(pairs, length, options)
        if data is None:
            continue
        asked = batch(list(itertools.islice(examples(data, "valid", seed), options.documents)))
        right = np.asarray(trained.right(asked))[asked["weights"] > 0]
        accuracy = round(float(right.mean()), 4)
        rows.append({"pairs": pairs, "length": length, "accuracy": accuracy, "answers": right.size})
    return rows


def measure(name: str, budget: int | None, options: Options, results: Results) -> None:
    """Trains and evaluates one memory at one budget, for the seeds that the results lack."""
    seeds = [seed for seed in options.seeds if not results.has(rule=name, budget=budget, seed=seed)]
    config = sized(name, budget, length=options.length) if seeds else None
    if config is None:
        if seeds:
            print(f"{name}: its smallest memory exceeds {budget} bytes", flush=True)
        return
    vocabulary = next(t for t in (task(n, options.length, options) for n in options.pairs) if t)
    config = replace(config, vocab_size=vocabulary.vocab_size)
    total = state_bytes(config, length=options.length)
    slots, scored = touched_bytes(config, total)
    trainer = Trainer(config, learning_rate=options.learning_rate, steps=options.steps)
    for seed in seeds:
        start = cpu_seconds()
        trained = trainer.train(training_batches(options, seed), seed=seed, prepare=bind)
        row = {"rule": name, "budget": budget, "seed": seed, "state_bytes": total}
        row |= {"slot_bytes_touched": slots, "bytes_touched": scored}
        row |= {"parameters": trained.parameters, "loss": round(trained.loss, 4)}
        row["cells"] = cells(trained, options, seed)
        row["cpu_seconds"] = cpu_seconds(start)
        results.add(row)
        shown = " ".join(f"{c['pairs']}x{c['length']}:{c['accuracy']:.2f}" for c in row["cells"])
        print(f"{name} {budget} seed {seed} {row['cpu_seconds']:.0f} s: {shown}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the results lack: all memories at the first budget, then at the next."""
    options = parse(Options, argv, description=__doc__)
    chosen = replace(options, rules=(), budgets=(), seeds=())  # These may differ between calls.
    results = Results(options.out, settings=settings(chosen), machine=environment)
    bounded = [name for name in options.rules if name not in UNBOUNDED]
    runs: list[tuple[str, int | None]] = [(n, None) for n in UNBOUNDED if n in options.rules]
    runs += [(name, budget) for budget in options.budgets for name in bounded]
    for name, budget in runs:
        measure(name, budget, options, results)
        jax.clear_caches()


if __name__ == "__main__":
    main()
