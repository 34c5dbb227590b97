"""Measures memory and time to read one very long text, write once at its end, and answer.

    python -m benchmarks.speed.long_reading --tokens 170000 --out long_reading.json

The steps are those of a needle evaluation (`fwpkm_jax.evaluation.readers.stream_reader`), with
random weights and tokens: read, write, read a question of 32 tokens, decode 6 tokens. A text of
128,000 words has about 170,000 tokens. On a shared machine rely on `cpu_seconds` rather than
`seconds`.
"""

import os
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
    peak_device_megabytes,
    peak_host_megabytes,
    planned_megabytes,
    settings,
    write_result,
)
from benchmarks.options import parse
from benchmarks.speed.layer import uniform_memory
from fwpkm_jax.config import load_config
from fwpkm_jax.evaluation.readers import stream_reader
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader, decode, flush
from fwpkm_jax.evaluation.reconfigure import with_yarn
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import layer_name

_QUESTION, _ANSWER = 32, 6


@dataclass(frozen=True, kw_only=True)
class Options:
    """Reads one text of `tokens` tokens, once."""

    config: str = "gdn_swa__pkm6_fwpkm2_10"
    """Config of the model, a name or a file."""
    tokens: int = 8192
    """Length of the text."""
    piece_length: int = 512
    """Tokens read per call."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations."""
    run: bool = True
    """False: only compiles and reports the memory of the compiled calls as `planned`."""
    out: Path | None = None
    """File for the JSON; None: print it."""


class _Clock:
    """Seconds, CPU seconds and peak memory of one part after another."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, float]] = {}
        self._mark()

    def _mark(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def end(self, name: str) -> None:
        self.parts[name] = {
            "seconds": time.perf_counter() - self._began,
            "cpu_seconds": time.process_time() - self._cpu,
            "peak_megabytes": peak_host_megabytes(),
        }
        print(name, self.parts[name], flush=True)
        self._mark()


def plan(options: Options) -> dict[str, dict[str, float]]:
    """Memory of the compiled calls in MB: their arguments, temporaries and new outputs."""
    config = _model_config(options)
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(with_yarn(model, factor=64.0, original_length=1024))
    rule = config.fast_weight.rule

    def start():
        memory = {layer_name(index): uniform_memory(rule) for index in config.memory_layers}
        sizes = {"max_length": _kept(options), "max_chunk_size": _waiting(options)}
        return nnx.merge(graphdef, params).init_stream(memory, batch=1, **sizes)

    stream = jax.eval_shape(start)
    tokens = jax.ShapeDtypeStruct((1, options.piece_length), jnp.int32)
    settings = {"chunk_size": "flush", "write": True, "vocab_size": config.vocab_size}
    calls = {
        "read": stream_reader._read_piece.lower(
            graphdef, params, stream, tokens, None, None, partition=None, **settings
        ),
        "write": flush.lower(graphdef, params, stream),
    }
    planned = {}
    for name, lowered in calls.items():
        memory = planned_megabytes(lowered.compile())
        given = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, stream)))
        planned[name] = {
            "given_megabytes": given / 1e6,
            "temporary_megabytes": memory["temporary"],
            "new_output_megabytes": memory["new_output"],
        }
        print(name, planned[name], flush=True)
    return planned


def _model_config(options: Options) -> ModelConfig:
    return replace(load_config(options.config).model, activation_dtype=options.dtype)


def _waiting(options: Options) -> int:
    return options.tokens + 2 * _QUESTION


def _kept(options: Options) -> int:
    return options.tokens + _QUESTION + _ANSWER


def measure(options: Options) -> dict[str, Any]:
    """Time and memory of each part of one reading."""
    clock = _Clock()
    config = _model_config(options)
    model = nnx.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))()
    model = with_yarn(model, factor=64.0, original_length=1024)
    make = jax.jit(lambda: uniform_memory(config.fast_weight.rule))
    memory = {layer_name(index): make() for index in config.memory_layers}
    reader = StreamReader(
        model,
        memory,
        capacity=_waiting(options),
        max_length=_kept(options),
        piece_length=options.piece_length,
        vocab_size=config.vocab_size,
        write=True,
        chunk_size="flush",
    )
    text = np.random.default_rng(0).integers(config.vocab_size, size=options.tokens)
    jax.block_until_ready(reader.stream)
    clock.end("start")
    reader.read(text[: options.piece_length])
    jax.block_until_ready(reader.stream)
    clock.end("compile and first piece")
    reader.read(text[options.piece_length :])
    jax.block_until_ready(reader.stream)
    clock.end("read")
    reader.write()
    jax.block_until_ready(reader.stream)
    clock.end("write")
    reader.read(text[:_QUESTION])
    decode(reader, reader.next_token(), length=_ANSWER)
    clock.end("question and answer")
    return clock.parts


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    result = {
        "options": settings(options),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "planned": plan(options),
        "parts": measure(options) if options.run else None,
        "peak_megabytes": peak_host_megabytes(),
        "peak_device_megabytes": peak_device_megabytes(),
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
