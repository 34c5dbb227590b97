"""Training steps per second of the paper's models, with and without a memory.

    python -m benchmarks.speed.train_step --size paper --out benchmarks/results/train_step_h100.json

All models see the same random tokens and have the same optimiser. They take turns, each turn in a
process of its own, so that a busy moment of the machine or a change of its clocks affects all
alike; compiled programs are kept from one turn to the next. The result is written after each turn.
`speed_relative_to_backbone` is a model's samples per second over those of its backbone.

`--require-kernels` ends with an error if any operation fell back to plain JAX, except those that
PALLAS_KERNELS_REFERENCE names. `--profile` reports the longest kernels of each model's step.
`--record` keeps the slots that the first memory layer reads, for `benchmarks.kernels.rows
--stream`; this is a program of its own, which runs last.
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
    planned_megabytes,
    settings,
    write_result,
)
from benchmarks.options import from_json, parse, to_json
from benchmarks.speed.longest_kernels import longest_kernels
from benchmarks.speed.models import Size, baseline_of, model_of, remat_of, train_of
from fwpkm_jax.core.chunks import to_chunks
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
    """The paper's models by name; `__remat` at the end asks for `training.remat=block`, `__frozen`
    before it trains the memories alone."""
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
    profile: int = 0
    """Number of kernels to report, those that take longest in a step; from each model's last
    turn."""
    record: Path | None = None
    """.npz file for `slot_ids [tokens, places]`, read by the first memory layer of the first model
    that has one, at its start."""
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
        train=train_of(name),
        loss_block=loss_block,
        remat=remat_of(name),
    )

    def make_state() -> TrainState:
        return init_state(model, memory=memory, optimizer=optimizer, seed=0, train=train_of(name))

    return step, make_state


def measure(options: Options, name: str) -> dict[str, Any]:
    """One turn of one model in this process, its times one by one."""
    model = model_of(name, options.size)
    dispatch.decisions.clear()
    step, make_state = make_step(options.loss_block, name, model)
    state = jax.jit(make_state)()
    batch = random_batch(options, model)
    compiled = step.lower(state, batch).compile()
    chosen = implementations()
    holder = {"state": state}
    del state

    def call():
        holder["state"], metrics = compiled(holder["state"], batch)
        holder["loss"] = metrics["loss"]
        return metrics["loss"]

    times = call_seconds(call, repeats=options.repeats)
    final_loss = float(holder["loss"])
    longest = {}
    if options.profile:
        longest = {"longest_kernels": longest_kernels(call, number=options.profile)}
    cost = compiled.cost_analysis() or {}
    planned = planned_megabytes(compiled)
    return {
        "model": name,
        "seconds": times,
        "tokens": batch["loss_weight"].size,
        "gigabytes_accessed": cost.get("bytes accessed", 0.0) / 1e9,
        "gigaflop": cost.get("flops", 0.0) / 1e9,
        "argument_megabytes": planned["argument"],
        "temporary_megabytes": planned["temporary"],
        "peak_device_megabytes": peak_device_megabytes(),
        "peak_megabytes": peak_host_megabytes(),
        "final_loss": final_loss,
        "implementations": chosen,
        **longest,
    }


def random_batch(options: Options, model: ModelConfig) -> dict[str, jax.Array]:
    """The tokens that every model trains on."""
    length = options.length or default_length(options.size)
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.vocab_size, size=(options.batch, length + 1), dtype=np.int32)
    weights = np.ones((options.batch, length), np.float32)
    return jax.device_put({"tokens": tokens, "loss_weight": weights})


def implementations() -> list[dict[str, Any]]:
    """Every choice of a kernel or of plain JAX since the counter was cleared, and its reason."""
    return [
        {"op": op, "implementation": chosen, "reason": reason, "times": times}
        for (op, chosen, reason), times in sorted(dispatch.decisions.items())
    ]


def fallbacks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each operation that ran as plain JAX though the environment names it not."""
    return [
        f"{row['model']}: {one['op']} ran as plain JAX ({one['reason']})"
        for row in rows
        for one in row.get("implementations", ())
        if one["implementation"] == "reference"
        and one["reason"] != f"by {dispatch.REFERENCE_VARIABLE}"
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
        **good[-1],  # The last turn has the profile.
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


def record(options: Options, name: str) -> dict[str, Any]:
    """Writes the slots of the first memory layer, in the order of chunks, then of sequences."""
    model = model_of(name, options.size)
    _, make_state = make_step(options.loss_block, name, model)
    state, batch = jax.jit(make_state)(), random_batch(options, model)

    def slots(params, memory):
        out = nnx.merge(model_graph(model), params).hidden(batch["tokens"][:, :-1], memory)
        return next(iter(out.info.values())).access.slot_ids

    slot_ids = jax.jit(slots)(state.params, state.memory)
    size = model.fast_weight.chunk_size
    whole = slot_ids.shape[1] // size * size  # A short last chunk has no place in the record.
    slot_ids = to_chunks(slot_ids[None, :, :whole], size)[0]
    assert options.record is not None
    options.record.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        options.record, slot_ids=np.asarray(slot_ids).reshape(-1, slot_ids.shape[-1])
    )
    return {"recorded": slot_ids.size}


def work(task: str) -> dict[str, Any]:
    """A turn of the task's first model in this process, or its recording."""
    options = from_json(Options, task)
    function = measure if options.record is None else record
    return function(options, options.models[0])


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    for name in options.models:
        model_of(name, options.size)  # A misspelt name is refused before anything is measured.
    with_memory = [n for n in options.models if model_of(n, options.size).memory_layers]
    if options.record is not None and not with_memory:
        raise SystemExit(f"--record: none of the models {options.models} has a memory layer.")
    result: dict[str, Any] = {"environment": environment(), "options": settings(options)}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in options.models}
    with tempfile.TemporaryDirectory() as folder:
        kept = {"JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", folder)}

        def run(name: str, **changes: Any) -> dict[str, Any]:
            return processes.run_worker(
                "benchmarks.speed.train_step",
                to_json(replace(options, models=(name,), **changes)),
                variables=kept,
                limit_s=options.limit_s,
            )

        for turn in range(options.rounds):
            for name in options.models:
                last = turn == options.rounds - 1
                row = run(name, record=None, profile=options.profile if last else 0)
                turns[name].append(row)
                print(json.dumps({"model": name} | row), file=sys.stderr, flush=True)
                result["rows"] = rows_of(options, turns)
                if options.out is not None:
                    write_result(result, options.out)
        if options.record is not None:
            result["recording"] = run(with_memory[0])
            if options.out is not None:
                write_result(result, options.out)
    if options.out is None:
        write_result(result, None)
    found = fallbacks(result["rows"]) if options.require_kernels else []
    found += [
        f"{row['model']}: {reason}" for row in result["rows"] for reason in row.get("failed", ())
    ]
    if "failed" in result.get("recording", {}):
        found.append(f"{options.record}: {result['recording']['failed']}")
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
