"""Training steps per second of a decoder without a memory, with PKM, and with FwPKM.

    python benchmarks/train_step.py --size paper --out benchmarks/results/train_step_h100.json

The same random tokens and optimiser for each, every one in a process of its own; ratios are to the
decoder without a memory. On a machine that does other work, `--rounds` lets them take turns.
`--record` keeps the slots that the first memory layer reads, for
`kernels.py --stream`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from flax import nnx
from machine import (
    call_seconds,
    environment,
    peak_device_megabytes,
    peak_host_megabytes,
    settings,
    write_result,
)

from fwpkm_jax.core.chunks import split_chunks
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from fwpkm_jax.training.state import MemoryConfig, TrainState, init_state, model_graph
from fwpkm_jax.training.step import make_train_step

MEMORY_LAYERS = (2, 6, 10)

Variant = Literal["none", "pkm", "fwpkm", "none_remat", "pkm_remat", "fwpkm_remat"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times whole training steps."""

    size: Literal["tiny", "paper"] = "tiny"
    """tiny: 4 narrow layers for a CPU; paper: 12 layers, 768 wide, 512**2 slots."""
    variants: tuple[Variant, ...] = ("none", "pkm", "fwpkm")
    """Without a memory; PKM, or FwPKM, in layers 2, 6, 10 (tiny: layer 2); the same with
    `training.remat=block`."""
    batch: int = 8
    """Sequences per step, which share one carried memory."""
    length: int | None = None
    """Tokens per sequence; None: 4096 (tiny: 256)."""
    repeats: int = 5
    """Timed steps in a round; the median of all rounds is reported."""
    rounds: int = 1
    """Turns that each model takes, each in a new process; the step is compiled in the first."""
    loss_block: int = 2048
    """Tokens whose logits exist at once."""
    record: Path | None = None
    """.npz file for `slot_ids [tokens, places]`, read by FwPKM's first layer after the steps."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def model_config(size: str, variant: str) -> ModelConfig:
    variant = variant.removesuffix("_remat")
    if size == "paper":
        model, layers = ModelConfig(), MEMORY_LAYERS
    else:
        layers = (2,)
        rule = FwPKM(num_subkeys=64, key_dim=64, value_dim=64)
        model = ModelConfig(
            vocab_size=512,
            model_dim=64,
            mixers=("gdn", "gdn", "gdn", "swa"),
            mlp_dim=128,
            window=64,
            attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=32),
            gdn=GatedDeltaNetConfig(
                num_key_heads=2, num_value_heads=2, key_head_dim=32, value_head_dim=32
            ),
            fast_weight=FastWeightConfig(rule=rule, chunk_size=64),
            pkm=PKMConfig(num_subkeys=64, key_dim=64, value_dim=64, num_heads=2, top_k=8),
            activation_dtype="float32",
        )
    return replace(
        model,
        memory_layers=layers if variant == "fwpkm" else (),
        pkm_layers=layers if variant == "pkm" else (),
    )


def make_step(
    loss_block: int, variant: str, model: ModelConfig
) -> tuple[Any, Callable[[], TrainState]]:
    """The jitted training step of a variant, and what makes its first state."""
    memory = MemoryConfig(groups=1, lifetime="carried")
    optimizer_config = OptimizerConfig()
    optimizer = make_optimizer(optimizer_config, steps=1000)
    schedule = learning_rate_schedule(optimizer_config, steps=1000)
    step = make_train_step(
        model_graph(model),
        optimizer,
        schedule=schedule,
        micro_batches=1,
        memory=memory,
        loss_block=loss_block,
        remat="block" if variant.endswith("_remat") else None,
    )
    return step, lambda: init_state(model, memory=memory, optimizer=optimizer, seed=0)


def measure(options: Options, variant: str) -> dict[str, Any]:
    """One variant's row, its times one by one, in this process."""
    model = model_config(options.size, variant)
    length = options.length or default_length(options.size)
    step, make_state = make_step(options.loss_block, variant, model)
    state = jax.jit(make_state)()
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.vocab_size, size=(options.batch, length + 1), dtype=np.int32)
    weights = np.ones((options.batch, length), np.float32)
    batch = jax.device_put({"tokens": tokens, "loss_weight": weights})
    compiled = step.lower(state, batch).compile()
    holder = {"state": state}
    del state

    def call():
        holder["state"], metrics = compiled(holder["state"], batch)
        holder["loss"] = metrics["loss"]
        return metrics["loss"]

    times = call_seconds(call, repeats=options.repeats)
    if options.record is not None and variant == "fwpkm":
        record(options.record, model, holder["state"], batch)
    cost = compiled.cost_analysis() or {}
    return {
        "variant": variant,
        "seconds": times,
        "tokens": options.batch * length,
        "gigabytes_accessed": cost.get("bytes accessed", 0.0) / 1e9,
        "gigaflop": cost.get("flops", 0.0) / 1e9,
        "temporary_megabytes": compiled.memory_analysis().temp_size_in_bytes / 1e6,
        "peak_device_megabytes": peak_device_megabytes(),
        "peak_megabytes": peak_host_megabytes(),
        "final_loss": float(holder["loss"]),
    }


def default_length(size: str) -> int:
    return 4096 if size == "paper" else 256


def combine(options: Options, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """A variant's row from those of its rounds."""
    times = [seconds for row in rounds for seconds in row["seconds"]]
    median = statistics.median(times)
    return rounds[0] | {
        "seconds": times,
        "samples_per_second": options.batch / median,
        "tokens_per_second": rounds[0]["tokens"] / median,
        "milliseconds": 1e3 * median,
        "milliseconds_spread": 1e3 * (max(times) - min(times)),
    }


def record(path: Path, model: ModelConfig, state: TrainState, batch: dict[str, Any]) -> None:
    """Writes the slots of the first memory layer, in the order of chunks, then of sequences."""

    def slots(params, memory):
        out = nnx.merge(model_graph(model), params).hidden(batch["tokens"][:, :-1], memory)
        return next(iter(out.info.values())).slot_ids

    slot_ids = split_chunks(
        jax.jit(slots)(state.params, state.memory), model.fast_weight.chunk_size
    )
    np.savez(path, slot_ids=np.asarray(slot_ids).reshape(-1, slot_ids.shape[-1]))


def main(options: Options) -> None:
    rounds: dict[str, list[dict[str, Any]]] = {variant: [] for variant in options.variants}
    with tempfile.TemporaryDirectory() as cache:
        kept = {"JAX_COMPILATION_CACHE_DIR": cache} if options.rounds > 1 else {}
        for _ in range(options.rounds):
            for variant in options.variants:
                fields = asdict(replace(options, variants=(variant,), out=None))
                command = [sys.executable, __file__, "--worker", json.dumps(fields, default=str)]
                run = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | kept
                )
                rounds[variant].append(json.loads(run.stdout.splitlines()[-1]))
                print(json.dumps(rounds[variant][-1]), file=sys.stderr, flush=True)
    rows = [combine(options, of_variant) for of_variant in rounds.values()]
    baseline = next((r for r in rows if r["variant"] == "none"), None)
    if baseline is not None:
        for row in rows:
            ratio = row["samples_per_second"] / baseline["samples_per_second"]
            row["speed_relative_to_none"] = ratio
    result = {"environment": environment(), "options": settings(options), "rows": rows}
    write_result(result, options.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        fields = json.loads(sys.argv[2])
        fields["record"] = Path(fields["record"]) if fields["record"] else None
        worker = Options(**fields)
        print(json.dumps(measure(worker, worker.variants[0])))
    else:
        main(tyro.cli(Options))
