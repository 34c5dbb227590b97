"""Measures whether a text costs the same at any length: time per token, and memory.

    python -m benchmarks.speed.reading --tokens 1000000 --out benchmarks/results/reading_cpu.json

A stream of random tokens is read in pieces and every memory is written after each of its chunks.
All windows and memories have a fixed size, so that neither time nor memory may grow. Times are CPU
seconds of the process: medians over the pieces of each section of the text.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import environment, peak_host_megabytes, settings, write_result
from benchmarks.options import parse
from benchmarks.speed.layer import uniform_memory
from benchmarks.speed.models import Size, model_of
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import layer_name


@dataclass(frozen=True, kw_only=True)
class Options:
    """Reads one long text as a stream."""

    size: Size = "tiny"
    """tiny: 4 narrow layers; paper: 12 layers, 768 wide, 512**2 slots in each memory."""
    model: str = "gdn_swa__fwpkm2_6_10"
    """A model of the paper by name; one without full attention, whose cache would grow."""
    tokens: int = 1_000_000
    """Length of the text, rounded down to whole pieces."""
    piece: int = 1024
    """Tokens read per call."""
    sections: int = 10
    """Parts of the text that are reported."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def measure(options: Options) -> dict[str, Any]:
    """Reads the text, and reports each section."""
    config = model_of(options.model, options.size)
    graphdef = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))[0]
    params = jax.jit(lambda: nnx.state(LanguageModel(config, rngs=nnx.Rngs(0))))()
    rule = config.fast_weight.rule

    def start() -> Any:
        memory = {layer_name(index): uniform_memory(rule) for index in config.memory_layers}
        return nnx.merge(graphdef, params).init_stream(memory, batch=1, max_length=1)

    def read(params: Any, tokens: jax.Array, stream: Any) -> tuple[jax.Array, Any]:
        out = nnx.merge(graphdef, params).stream(tokens, stream)
        return out.logits[:, -1], out.stream

    stream, program = jax.jit(start)(), jax.jit(read, donate_argnums=2)
    rng = np.random.default_rng(0)

    def piece() -> jax.Array:
        return jnp.asarray(rng.integers(config.vocab_size, size=(1, options.piece)), jnp.int32)

    logits, stream = program(params, piece(), stream)  # Compiles.
    jax.block_until_ready(logits)
    pieces = options.tokens // options.piece
    rows = []
    for section in np.array_split(np.arange(pieces), options.sections):
        times = []
        for _ in section:
            tokens, began = piece(), time.process_time()
            logits, stream = program(params, tokens, stream)
            jax.block_until_ready(logits)
            times.append(time.process_time() - began)
        rows.append(
            {
                "tokens": int(section[-1] + 1) * options.piece,
                "microseconds_per_token": 1e6 * statistics.median(times) / options.piece,
                "peak_megabytes": peak_host_megabytes(),
                "finite": bool(jnp.all(jnp.isfinite(logits))),
            }
        )
        print(rows[-1], flush=True)
    each = [row["microseconds_per_token"] for row in rows]
    return {
        "rows": rows,
        "slowest_section_relative_to_fastest": max(each) / min(each),
        "stream_megabytes": sum(x.nbytes for x in jax.tree.leaves(stream)) / 1e6,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes one JSON."""
    options = parse(Options, argv, description=__doc__)
    machine = environment()
    result = {"environment": machine, "options": settings(options), **measure(options)}
    write_result(result, options.out)


if __name__ == "__main__":
    main()
