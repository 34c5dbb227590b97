"""Measures the time per token of streaming decoding, with and without a memory.

    python -m benchmarks.speed.decode --size paper --out benchmarks/results/decode_cpu.json

Each call of `LanguageModel.stream` decodes one token greedily; the stream is donated and the host
does not wait between tokens. The models take turns by blocks of tokens, so that a busy moment of
the machine affects all alike. The blocks together cover whole chunks, so the mean includes writes.
With `--prompt`, `generate` reads a prompt of so many tokens after each block, up to the logits of
its last one. Processor time is affected less than the clock by other programs.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import (
    environment,
    peak_device_megabytes,
    peak_host_megabytes,
    settings,
    write_result,
)
from benchmarks.options import parse
from benchmarks.speed.layer import table_copies, uniform_memory
from benchmarks.speed.models import Size, baseline_of, model_of
from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import layer_name


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times token-by-token decoding of one sequence."""

    size: Size = "tiny"
    """tiny: 4 narrow layers; paper: 12 layers, 768 wide, 512**2 slots in each memory."""
    models: tuple[str, ...] = ("gdn_swa", "gdn_swa__fwpkm2_6_10")
    """The paper's models by name."""
    chunks: int = 1
    """Chunks to decode; each ends with one write of every memory."""
    block: int = 32
    """Tokens timed together; must divide the chunk size."""
    prompt: int | None = None
    """Tokens of a prompt that is read after each block; None: prompts are not measured."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of activations; None: float32 on a CPU, bfloat16 elsewhere."""
    out: Path | None = None
    """File for the JSON; None: print it."""


class Decoder:
    """One model's compiled step and stream."""

    def __init__(self, options: Options, name: str):
        on_cpu = jax.default_backend() == "cpu"
        dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
        config = replace(model_of(name, options.size), activation_dtype=dtype)
        self.chunk_size = config.fast_weight.chunk_size
        if self.chunk_size % options.block:
            raise ValueError(f"block={options.block} does not divide chunks of {self.chunk_size}.")
        graphdef = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))[0]
        params = jax.jit(lambda: nnx.state(LanguageModel(config, rngs=nnx.Rngs(0))))()
        rule = config.fast_weight.rule

        def start():
            memory = {layer_name(index): uniform_memory(rule) for index in config.memory_layers}
            model = nnx.merge(graphdef, params)
            return model.init_stream(memory, batch=1, max_length=self.chunk_size)

        def step(params, token, stream):
            out = nnx.merge(graphdef, params).stream(token, stream)
            return jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out.stream

        self.stream, self.params = jax.jit(start)(), params
        self.token = jnp.zeros((1, 1), jnp.int32)
        lowered = jax.jit(step, donate_argnums=2).lower(self.params, self.token, self.stream)
        self.step = lowered.compile()
        table = f"f32[{rule.num_slots},{rule.value_dim}]"
        self.table_copies = table_copies(self.step, table)
        self.parameters = sum(x.size for x in jax.tree.leaves(params))
        if options.prompt is not None:
            self.model = nnx.merge(graphdef, params)
            memory = {layer_name(index): uniform_memory(rule) for index in config.memory_layers}
            room = (options.chunks * self.chunk_size // options.block + 1) * options.prompt
            self.reader = init_generation(self.model, memory, batch=1, max_length=room)
            rng = np.random.default_rng(0)
            self.prompt = rng.integers(config.vocab_size, size=(1, options.prompt))

    def decode(self, tokens: int) -> np.ndarray:
        """Decodes so many tokens; the seconds by the clock and by the processor."""
        began = _clocks()
        for _ in range(tokens):
            self.token, self.stream = self.step(self.params, self.token, self.stream)
        jax.block_until_ready(self.token)
        return _clocks() - began

    def read(self) -> np.ndarray:
        """Reads the prompt behind what was read before; the seconds as `decode`."""
        began = _clocks()
        read = generate(self.model, self.prompt, self.reader, max_new_tokens=0)
        self.reader = jax.block_until_ready(read.state)
        return _clocks() - began


def _clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def measure(options: Options) -> list[dict[str, Any]]:
    decoders = {name: Decoder(options, name) for name in options.models}
    times: dict[str, list[np.ndarray]] = {name: [] for name in decoders}
    prompts: dict[str, list[np.ndarray]] = {name: [] for name in decoders}
    for decoder in decoders.values():
        decoder.decode(
            options.block
        )  # Warms up, and moves the write away from the ends of the timed tokens.
        if options.prompt is not None:
            decoder.read()
    chunk_size = next(iter(decoders.values())).chunk_size
    for _ in range(options.chunks * chunk_size // options.block):
        for name, decoder in decoders.items():
            times[name].append(decoder.decode(options.block) / options.block)
            if options.prompt is not None:
                prompts[name].append(decoder.read() / options.prompt)
    return [
        row(name, decoder, times[name], prompts[name], options)
        for name, decoder in decoders.items()
    ]


def row(
    name: str,
    decoder: Decoder,
    times: list[np.ndarray],
    prompts: list[np.ndarray],
    options: Options,
) -> dict[str, Any]:
    """What a model's blocks and prompts took, per token."""
    blocks, cpu = 1e3 * np.array(times).T
    found = {
        "model": name,
        "parameters": decoder.parameters,
        "ms_per_token": float(blocks.mean()),
        "ms_per_token_without_write": float(np.median(blocks)),
        "ms_per_token_quartiles": [statistics.quantiles(blocks, n=4)[i] for i in (0, 2)],
        "processor_ms_per_token": float(cpu.mean()),
        "table_copies": decoder.table_copies,
    }
    if options.prompt is not None:
        read, cpu = 1e3 * np.median(prompts, axis=0)
        found |= {"prompt_ms_per_token": float(read), "prompt_processor_ms_per_token": float(cpu)}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    rows = measure(options)
    by_name = {row["model"]: row for row in rows}
    for row in rows:
        baseline = by_name.get(baseline_of(row["model"]))
        if baseline is None:
            continue
        for time_of in ("ms_per_token", "ms_per_token_without_write"):
            ratio = baseline[time_of] / row[time_of]
            row[f"{time_of}_speed_relative_to_backbone"] = ratio
    result = {
        "environment": environment(),
        "options": settings(options),
        "rows": rows,
        "peak_megabytes": peak_host_megabytes(),
        "peak_device_megabytes": peak_device_megabytes(),
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
