"""Time of a token of an exported model, here and in PyTorch, with its memories and without.

    python -m benchmarks.speed.in_pytorch --peer-python TORCH_PYTHON

A Qwen3 of random weights gets memories as `fwpkm train --add_memory` puts them in, and is exported.
Here and there, the model with its memories and its base without them take turns: each decodes a
block of tokens greedily, one sequence, in float32. The blocks of a model together hold whole
chunks, so the means have the writes in them. On a machine with other work the processor's time says
more than the clock. PyTorch loads the exported folder with its programs,
and for the base without them; it runs in the Python of `--peer-python`, which needs torch and
transformers.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import processes
from benchmarks.machine import environment, settings, write_result
from benchmarks.options import parse
from fwpkm_jax import load_config
from fwpkm_jax.cli.experiment import with_memories
from fwpkm_jax.evaluation.reconfigure import without_memory_layers
from fwpkm_jax.generation import GenerationState, generate, init_generation
from fwpkm_jax.interchange import Weights, start_run
from fwpkm_jax.interchange.hf import export_model, model_config
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.run.load import Run, load_run

PEER_PROGRAM = Path(__file__).with_name("peer_in_pytorch.py")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times decoding here and in PyTorch."""

    layers: int = 12
    """Blocks; memories stand before those at one and two thirds of the depth."""
    width: int = 512
    """Of the residual stream, a multiple of 64."""
    vocab: int = 8192
    """Number of token ids."""
    chunks: int = 2
    """Chunks of 128 tokens that each model decodes; each ends with a write."""
    block: int = 32
    """Tokens timed together; divides 128."""
    threads: int = 2
    """Threads of PyTorch."""
    peer_python: Path | None = None
    """A Python with torch and transformers; None: only this package is timed."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def make_run(options: Options, folder: Path) -> None:
    """A run of random weights at FOLDER/run, and its export at FOLDER/out."""
    text = {
        "model_type": "qwen3", "vocab_size": options.vocab, "hidden_size": options.width,
        "intermediate_size": 3 * options.width, "num_hidden_layers": options.layers,
        "num_attention_heads": options.width // 64, "num_key_value_heads": options.width // 64,
        "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 4096,
    }  # fmt: skip
    model = replace(model_config(text), activation_dtype="float32", parameter_dtype="float32")
    experiment = replace(load_config("books_tiny"), model=replace(model, memory_layers=()))
    experiment = with_memories(experiment, "the model")
    lm = LanguageModel(experiment.model, rngs=nnx.Rngs(0))
    weights = Weights(nnx.state(lm), lm.init_memory(jax.random.key(1)))
    start_run(replace(experiment, run_dir=str(folder / "run")), weights)
    export_model(folder / "run", folder / "out", say=lambda _: None)


def ours(options: Options, run: Run) -> dict[str, list[list[float]]]:
    """Seconds and processor seconds of each block here, by model."""
    models = {
        "with memories": (run.model, jax.tree.map(lambda x: x[:1], run.memory)),
        "base": (without_memory_layers(run.model), {}),
    }
    most = 2 * options.block + options.chunks * 128
    states: dict[str, GenerationState] = {}
    for name, (model, memory) in models.items():
        start = init_generation(model, memory, batch=1, max_length=most)
        states[name] = generate(model, [np.arange(4)], start, max_new_tokens=0).state

    def block(name: str) -> list[float]:
        began = time.perf_counter(), time.process_time()
        out = generate(models[name][0], None, states[name], max_new_tokens=options.block)
        jax.block_until_ready(out.tokens)
        states[name] = out.state
        return [time.perf_counter() - began[0], time.process_time() - began[1]]

    for name in models:
        block(name)  # Compiles.
    found: dict[str, list[list[float]]] = {name: [] for name in models}
    for _ in range(options.chunks * 128 // options.block):
        for name in models:
            found[name].append(block(name))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(options, folder)
        times = {"fwpkm_jax": ours(options, load_run(folder / "run"))}
        versions: dict[str, Any] = {}
        if options.peer_python is not None:
            task = {
                "folder": str(folder / "out"),
                "block": options.block,
                "blocks": options.chunks * 128 // options.block,
                "threads": options.threads,
            }
            command = [str(options.peer_python), str(PEER_PROGRAM), "--task", json.dumps(task)]
            answer = processes.run_json(command)
            if "failed" in answer:
                raise SystemExit(f"PyTorch: {answer['failed']}.")
            times["PyTorch"], versions = answer["seconds"], answer["versions"]
    rows = [
        {
            "program": program,
            "model": model,
            **{
                name: 1e3 * statistics.mean(seconds) / options.block
                for name, seconds in zip(
                    ("ms_per_token", "processor_ms_per_token"),
                    zip(*blocks, strict=True),
                    strict=True,
                )
            },
        }
        for program, models in times.items()
        for model, blocks in models.items()
    ]
    result = {
        "environment": environment() | versions,
        "options": settings(options),
        "rows": rows,
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
