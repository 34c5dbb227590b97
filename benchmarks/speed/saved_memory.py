"""Times saving, forking and loading a memory, and counts the bytes on disk.

    python -m benchmarks.speed.saved_memory

A memory of the paper's table is saved whole, forked, and the fork is saved again with some slots
written. Times are of one call each; what the system's cache of files does is part of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.machine import environment, peak_host_megabytes, settings, write_result
from benchmarks.options import parse
from fwpkm_jax import memories
from fwpkm_jax.generation import init_generation
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import FwPKM


@dataclass(frozen=True, kw_only=True)
class Options:
    """Saves, forks and loads one memory."""

    subkeys: int = 512
    """Sub-keys of the table, which has their square of slots."""
    width: int = 512
    """Numbers of a slot's value."""
    written: int = 4096
    """Slots that the fork has written."""
    out: Path | None = None
    """File of the results."""


def measure(options: Options, folder: Path) -> list[dict[str, Any]]:
    """Seconds and bytes of each step."""
    rule = FwPKM(
        num_subkeys=options.subkeys,
        key_dim=options.width,
        value_dim=options.width,
        top_k=min(8, options.subkeys),
    )
    config = ModelConfig(
        vocab_size=32,
        model_dim=16,
        mlp_dim=16,
        mixers=("retnet",),
        memory_layers=(0,),
        fast_weight=FastWeightConfig(rule=rule),
    )
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    state = init_generation(model, model.init_memory(jax.random.key(0)), batch=1, max_length=1)
    rows: list[dict[str, Any]] = []

    def step(what: str, name: str, call: Callable[[], Any]) -> None:
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds = round(time.perf_counter() - began, 4)
        size = memories.describe(folder, name).num_bytes
        rows.append({"step": what, "seconds": seconds, "bytes": size})

    def save(name: str) -> Callable[[], None]:
        return lambda: memories.save(folder, name, state, model=model, keep="memory")

    step("save whole", "start", save("start"))
    step("fork", "alice", lambda: memories.fork(folder, "start", "alice"))
    layer = state.stream.memory["layer_0"]
    slots = jax.random.permutation(jax.random.key(1), options.subkeys**2)[: options.written]
    layer = layer._replace(values=layer.values.at[:, slots].add(1))
    state = state._replace(stream=state.stream._replace(memory={"layer_0": layer}))
    step("save the written fork", "alice", save("alice"))
    step("fork of the written fork", "bob", lambda: memories.fork(folder, "alice", "bob"))
    step("load", "bob", lambda: memories.load(folder, "bob", model, max_length=1))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the steps."""
    options = parse(Options, argv, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    for row in rows:
        print(f"{row['step']}: {row['seconds']:.3f} s, {row['bytes']:,} bytes")
    result = {"settings": settings(options), "machine": environment(), "rows": rows}
    write_result({**result, "peak_host_megabytes": peak_host_megabytes()}, options.out)


if __name__ == "__main__":
    main()
