"""Training steps per second of the paper's models, with and without a memory.

    python -m benchmarks.speed.train_step --size paper --out benchmarks/results/train_step_h100.json

All models see the same random tokens and have the same optimiser. They take turns, each turn in a
process of its own, so that a busy moment of the machine or a change of its clocks affects all
alike; compiled programs are kept from one turn to the next. The result is written after each turn.
`speed_relative_to_backbone` is a model's samples per second over those of its backbone.

`--require-kernels` ends with an error if any operation fell back to plain JAX. `--record` keeps the
slots that the first memory layer reads, for `benchmarks.kernels.rows --stream`.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import processes
from benchmarks.machine import (
    call_seconds,
    environment,
    peak_device_megabytes,
    peak_host_megabytes,
    settings,
    write_result,
)
from benchmarks.options import from_json, parse, to_json
from benchmarks.speed.models import Size, baseline_of, model_of, remat_of
from fwpkm_jax.core.chunks import split_chunks
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from fwpkm_jax.training.state import MemoryConfig, TrainState, init_state, model_graph
from fwpkm_jax.training.step import make_train_step
from pallas_kernels import dispatch


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times whole training steps."""

    size: Size = "tiny"
    """tiny: 4 narrow layers for a CPU; paper: 12 layers, 768 wide, 512**2 slots."""
    models: tuple[str, ...] = ("gdn", "gdn__fwpkm2_6_10", "gdn__pkm2_6_10")
    """The paper's models by name; `__remat` at the end asks for `training.remat=block`."""
    batch: int = 8
    """Sequences per step, which share one carried memory."""
    length: int | None = None
    """Tokens per sequence; None: 4096 (tiny: 256)."""
    repeats: int = 5
    """Timed steps in a turn; the median over all turns is reported."""
    rounds: int = 1
    """Turns of each model, each in a new process; the step is compiled in the first."""
    loss_block: int = 2048
    """Tokens whose logits exist at once."""
    limit_s: float = 600
    """Seconds after which a turn is ended and reported as failed."""
    require_kernels: bool = False
    """Ends with an error if an operation ran as plain JAX."""
    record: Path | None = None
    """.npz file for `slot_ids [tokens, places]`, read by FwPKM's first layer after the steps."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def make_step(
    loss_block: int, name: str, model: ModelConfig
) -> tuple[Any, Callable[[], TrainState]]:
    """The jitted training step of a model, and what makes its first state."""
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
        remat=remat_of(name),
    )
    return step, lambda: init_state(model, memory=memory, optimizer=optimizer, seed=0)


def measure(options: Options, name: str) -> dict[str, Any]:
    """One turn of one model in this process, its times one by one."""
    model = model_of(name, options.size)
    length = options.length or default_length(options.size)
    dispatch.decisions.clear()
    step, make_state = make_step(options.loss_block, name, model)
    state = jax.jit(make_state)()
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.vocab_size, size=(options.batch, length + 1), dtype=np.int32)
    weights = np.ones((options.batch, length), np.float32)
    batch = jax.device_put({"tokens": tokens, "loss_weight": weights})
    compiled = step.lower(state, batch).compile()
    chosen = implementations()
    holder = {"state": state}
    del state

    def call():
        holder["state"], metrics = compiled(holder["state"], batch)
        holder["loss"] = metrics["loss"]
        return metrics["loss"]

    times = call_seconds(call, repeats=options.repeats)
    if options.record is not None and model.memory_layers:
        record(options.record, model, holder["state"], batch)
    cost = compiled.cost_analysis() or {}
    return {
        "model": name,
        "seconds": times,
        "tokens": options.batch * length,
        "gigabytes_accessed": cost.get("bytes accessed", 0.0) / 1e9,
        "gigaflop": cost.get("flops", 0.0) / 1e9,
        "temporary_megabytes": compiled.memory_analysis().temp_size_in_bytes / 1e6,
        "peak_device_megabytes": peak_device_megabytes(),
        "peak_megabytes": peak_host_megabytes(),
        "final_loss": float(holder["loss"]),
        "implementations": chosen,
    }


def implementations() -> list[dict[str, Any]]:
    """Every choice of a kernel or of plain JAX since the counter was cleared, and its reason."""
    return [
        {"op": op, "implementation": chosen, "reason": reason, "times": times}
        for (op, chosen, reason), times in sorted(dispatch.decisions.items())
    ]


def fallbacks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each operation of the rows that ran as plain JAX."""
    return [
        f"{row['model']}: {one['op']} ran as plain JAX ({one['reason']})"
        for row in rows
        for one in row.get("implementations", ())
        if one["implementation"] == "reference"
    ]


def default_length(size: Size) -> int:
    return 4096 if size == "paper" else 256


def combine(options: Options, name: str, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A model's row from those of its turns; turns that failed are left out but for the reason."""
    good = [turn for turn in turns if "seconds" in turn]
    row: dict[str, Any] = {"model": name}
    if failed := [turn["failed"] for turn in turns if "failed" in turn]:
        row["failed"] = failed
    if not good:
        return row
    times = [seconds for turn in good for seconds in turn["seconds"]]
    median = statistics.median(times)
    return {
        **good[0],
        **row,
        "seconds": times,
        "samples_per_second": options.batch / median,
        "tokens_per_second": good[0]["tokens"] / median,
        "milliseconds": 1e3 * median,
        "milliseconds_spread": 1e3 * (max(times) - min(times)),
    }


def rows_of(options: Options, turns: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The row of every model that had a turn, with its speed relative to its backbone's."""
    rows = {name: combine(options, name, taken) for name, taken in turns.items() if taken}
    for name, row in rows.items():
        baseline = rows.get(baseline_of(name), {}).get("samples_per_second")
        if baseline and "samples_per_second" in row:
            row["speed_relative_to_backbone"] = row["samples_per_second"] / baseline
    return list(rows.values())


def record(path: Path, model: ModelConfig, state: TrainState, batch: dict[str, Any]) -> None:
    """Writes the slots of the first memory layer, in the order of chunks, then of sequences."""

    def slots(params, memory):
        out = nnx.merge(model_graph(model), params).hidden(batch["tokens"][:, :-1], memory)
        return next(iter(out.info.values())).access.slot_ids

    slot_ids = split_chunks(
        jax.jit(slots)(state.params, state.memory), model.fast_weight.chunk_size
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, slot_ids=np.asarray(slot_ids).reshape(-1, slot_ids.shape[-1]))


def work(task: str) -> dict[str, Any]:
    """A turn of the task's first model, in this process."""
    options = from_json(Options, task)
    return measure(options, options.models[0])


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    for name in options.models:
        model_of(name, options.size)  # A misspelt name is refused before anything is measured.
    result: dict[str, Any] = {"environment": environment(), "options": settings(options)}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in options.models}
    with tempfile.TemporaryDirectory() as folder:
        kept = {"JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", folder)}
        for turn in range(options.rounds):
            for name in options.models:
                last = turn == options.rounds - 1
                task = replace(options, models=(name,), record=options.record if last else None)
                row = processes.run_worker(
                    "benchmarks.speed.train_step",
                    to_json(task),
                    variables=kept,
                    limit_s=options.limit_s,
                )
                turns[name].append(row)
                print(json.dumps({"model": name} | row), file=sys.stderr, flush=True)
                result["rows"] = rows_of(options, turns)
                if options.out is not None:
                    write_result(result, options.out)
    if options.out is None:
        write_result(result, None)
    found = fallbacks(result["rows"]) if options.require_kernels else []
    found += [
        f"{row['model']}: {reason}" for row in result["rows"] for reason in row.get("failed", ())
    ]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
