"""Measures time and memory of one FwPKM layer by its number of slots, at the paper's widths.

    python -m benchmarks.speed.layer --out benchmarks/results/layer_cpu.json

Every size has its own process, so that peak memory is its own. The device's copy bandwidth and
matmul rate are measured in the same run.

`--peer-titans` also times the neural memory of titans-pytorch: a layer of `model_dim` with its own
projections, whose memory is an MLP per sequence, written by gradient steps with momentum. It is
another kind of memory, so only its speed can be compared.

`--rules fwpkm sdm` also times Sparse Delta Memory with as many slots. A token writes 8 of them, and
reads 8.
"""

import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import processes
from benchmarks.machine import (
    environment,
    median_seconds,
    peak_device_megabytes,
    peak_host_megabytes,
    planned_megabytes,
    settings,
    write_result,
)
from benchmarks.options import from_json, parse, to_json
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.rules import SDM, FwPKM, FwPKMMemory
from fwpkm_jax.rules.base import AbstractChunkRule

PEER_PROGRAM = Path(__file__).with_name("peer_titans.py")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times an FwPKM layer, forward and forward + backward, for several numbers of slots."""

    rules: tuple[Literal["fwpkm", "sdm"], ...] = ("fwpkm",)
    """Memories that are timed."""
    subkeys: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Sub-keys per codebook; each size has this many squared slots."""
    model_dim: int = 768
    """Width of the residual stream."""
    dim: int = 512
    """Width of keys and values."""
    chunk_size: int = 512
    """Tokens between two writes."""
    length: int = 4096
    """Tokens of the forward pass."""
    backward_length: int = 2048
    """Tokens of the forward + backward pass."""
    batch: int = 1
    """Sequences, which share one memory."""
    repeats: int = 5
    """Timed calls; the median is reported."""
    passes: tuple[Literal["forward", "train"], ...] = ("forward", "train")
    """Forward alone, or forward + backward to the layer's parameters and input."""
    peer_titans: Path | None = None
    """Python with titans-pytorch; None: no peer is timed."""
    peer_chunks: tuple[int, ...] = (64, 512)
    """The peer's tokens per gradient; it writes every `chunk_size` tokens, as FwPKM does."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def measure(options: Options, subkeys: int, which: str) -> dict[str, Any]:
    """Times the first rule with one size and pass in this process."""
    (name,) = options.rules
    rule = FwPKM(num_subkeys=subkeys, key_dim=options.dim, value_dim=options.dim)
    if name == "sdm":
        rule = SDM(num_subkeys=subkeys, value_dim=options.dim, num_writes=8, num_reads=8)
    config = FastWeightConfig(
        rule=rule, chunk_size=options.chunk_size, weight_by_gate=name == "fwpkm"
    )
    rngs = nnx.Rngs(0)
    layer = FastWeight(config, options.model_dim, norm_eps=1e-5, init_std=0.02, rngs=rngs)
    graphdef, params = nnx.split(layer)
    # All rows are equal: values do not affect the time, and drawing random ones needs several
    # tables of memory.
    memory = jax.jit(
        lambda: uniform_memory(rule) if name == "fwpkm" else layer.init_memory(jax.random.key(0))
    )()
    jax.block_until_ready(memory)
    length = options.length if which == "forward" else options.backward_length
    shape = (options.batch, length, options.model_dim)
    x = jax.random.normal(jax.random.key(1), shape)
    table = f"f32[{rule.num_slots},{rule.value_dim}]"

    def forward(params, memory, x):
        y, memory, _ = nnx.merge(graphdef, params)(x, memory)
        return y, memory

    def train(params, memory, x):
        def loss(params, x):
            y, written = forward(params, memory, x)
            return jnp.sum(y**2), written

        gradients, written = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return gradients, written

    # The memory is donated, as in training, where the old memory is not needed after the step.
    step = jax.jit({"forward": forward, "train": train}[which], donate_argnums=1)
    compiled = step.lower(params, memory, x).compile()
    before = peak_host_megabytes()
    state = {"memory": memory}
    del memory

    def call():
        out, state["memory"] = compiled(params, state["memory"], x)
        return out, state["memory"]

    jax.block_until_ready(call())
    cpu_start = time.process_time()
    seconds, spread = median_seconds(call, repeats=options.repeats)
    # The mean, warm-up call included: other work on the machine disturbs it least.
    cpu_seconds = (time.process_time() - cpu_start) / (options.repeats + 1)
    tokens = options.batch * length
    return {
        "rule": name,
        "subkeys": subkeys,
        "slots": rule.num_slots,
        "pass": which,
        "tokens": tokens,
        "ms_per_token": 1e3 * seconds / tokens,
        "ms_per_token_spread": 1e3 * spread / tokens,
        "cpu_ms_per_token": 1e3 * cpu_seconds / tokens,
        "table_megabytes": rule.num_slots * rule.value_dim * 4 / 1e6,
        "peak_device_megabytes": peak_device_megabytes(),
        "peak_megabytes": peak_host_megabytes(),
        "before_first_call_megabytes": before,
        "temporary_megabytes": planned_megabytes(compiled)["temporary"],
        "table_copies": table_copies(compiled, table),
    }


def measure_peer(options: Options, which: str, chunk_size: int) -> dict[str, Any]:
    """The peer's row, measured in its own process, or how that failed."""
    length = options.length if which == "forward" else options.backward_length
    task = {
        "pass": which,
        "width": options.model_dim,
        "chunk_size": chunk_size,
        "write_every": options.chunk_size,
        "batch": options.batch,
        "tokens": options.batch * length,
        "repeats": options.repeats,
        "device": "cpu" if jax.default_backend() == "cpu" else "cuda",
    }
    command = [str(options.peer_titans), str(PEER_PROGRAM), "--task", json.dumps(task)]
    return {"peer": "titans-pytorch", **task, **processes.run_json(command)}


def uniform_memory(rule: AbstractChunkRule) -> FwPKMMemory:
    """One group's memory with random keys and equal rows of values.

    Raises:
      ValueError: the rule is not FwPKM.
    """
    if not isinstance(rule, FwPKM):
        raise ValueError(f"rule={type(rule).__name__}: only FwPKM's memory is filled here.")
    rngs = jax.random.split(jax.random.key(1))
    shape = (1, rule.num_heads, 2, rule.num_subkeys, rule.key_dim // 2)
    bound = rule.key_dim**-0.5
    keys = jax.random.uniform(rngs[0], shape, minval=-bound, maxval=bound)
    row = jax.random.normal(rngs[1], (1, 1, rule.value_dim)) * bound
    return FwPKMMemory(keys, jnp.broadcast_to(row, (1, rule.num_slots, rule.value_dim)))


def table_copies(compiled: Any, table: str) -> int:
    """Number of copies of a table in a compiled program, with or without the axis of groups."""
    text = str(compiled.as_text())
    grouped = table.replace("[", "[1,")
    return sum(
        (f"= {table}" in line or f"= {grouped}" in line)
        and (" copy(" in line or " copy-start(" in line)
        for line in text.splitlines()
    )


def work(task: str) -> dict[str, Any]:
    """The row of the task's first size and pass, in this process."""
    options = from_json(Options, task)
    return measure(options, options.subkeys[0], options.passes[0])


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    result: dict[str, Any] = {"environment": environment(), "options": settings(options)}
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if options.out is not None:
            write_result(result | {"rows": rows}, options.out)

    for which in options.passes:
        for rule, subkeys in itertools.product(options.rules, options.subkeys):
            one = {"rules": (rule,), "subkeys": (subkeys,), "passes": (which,)}
            task = replace(options, **one, peer_titans=None, out=None)
            row = processes.run_worker("benchmarks.speed.layer", to_json(task))
            add({"rule": rule, "subkeys": subkeys, "pass": which} | row)
        for chunk_size in options.peer_chunks if options.peer_titans else ():
            add(measure_peer(options, which, chunk_size))
    if options.out is None:
        write_result(result | {"rows": rows}, None)


if __name__ == "__main__":
    main()
