"""Time of a generated token: an exported model in PyTorch with and without its memory, and here.

    python -m benchmarks.speed.peer_pytorch --threads 2

A random Qwen3 of 4 layers with two memories of 128 x 128 slots; a prompt is read, then tokens are
generated one by one, the three ways in turns. Needs torch and transformers.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from fwpkm_jax import FastWeightConfig, FwPKM, generate, init_generation, load_config, load_run
from fwpkm_jax.interchange import start_run
from fwpkm_jax.interchange.hf import export_model, model_config
from fwpkm_jax.interchange.weights import abstract_weights

QWEN = {
    "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip


def exported(folder: Path) -> None:
    """Writes FOLDER/run and FOLDER/out."""
    rule = FwPKM(num_subkeys=128, key_dim=256, value_dim=256)
    model = dataclasses.replace(
        model_config(QWEN),
        memory_layers=(1, 3),
        fast_weight=FastWeightConfig(rule=rule, chunk_size=128),
        activation_dtype="float32",
    )
    like, rng = abstract_weights(model), np.random.default_rng(0)
    arrays = {
        name: rng.normal(0, 0.02, x.shape).astype(x.dtype) for name, x in like.named().items()
    }
    memory = jax.tree.map(lambda x: x[None], rule.init(jax.random.key(0)))
    weights = like.replaced(arrays)._replace(memory=dict.fromkeys(like.memory, memory))
    run = str(folder / "run")
    start_run(dataclasses.replace(load_config("books_tiny"), model=model, run_dir=run), weights)
    export_model(run, folder / "out", say=lambda _: None)


def ways(folder: Path, prompt: np.ndarray):
    """By name: a function that generates so many tokens after the prompt."""
    options = {"do_sample": False, "pad_token_id": 0}
    found = {}
    for name, trust in (("base in PyTorch", False), ("with memory in PyTorch", True)):
        model = AutoModelForCausalLM.from_pretrained(
            folder / "out", trust_remote_code=trust, dtype=torch.float32
        )
        found[name] = lambda new, model=model: model.generate(
            torch.tensor(prompt), min_new_tokens=new, max_new_tokens=new, **options
        )
    run = load_run(folder / "run")

    def ours(new: int) -> None:
        memory = jax.tree.map(lambda x: x[:1], run.memory)
        state = init_generation(run.model, memory, batch=1, max_length=prompt.shape[1] + 512)
        jax.block_until_ready(generate(run.model, prompt, state, max_new_tokens=new).tokens)

    return found | {"with memory in JAX": ours}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("threads", 2), ("prompt", 256), ("new", 128), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    prompt = np.random.default_rng(1).integers(0, QWEN["vocab_size"], (1, asked.prompt))
    with tempfile.TemporaryDirectory() as folder:
        exported(Path(folder))
        all_ways = ways(Path(folder), prompt)
        times: dict[str, list[float]] = {name: [] for name in all_ways}
        for repeat in range(asked.repeats + 1):  # The first compiles.
            for name, way in all_ways.items():
                seconds = []
                for new in (1, asked.new + 1):
                    start = time.perf_counter()
                    way(new)
                    seconds.append(time.perf_counter() - start)
                if repeat:
                    times[name].append(1e3 * (seconds[1] - seconds[0]) / asked.new)
    for name, found in times.items():
        result = {"way": name, "ms_per_token": statistics.median(found)}
        result |= {"least": min(found), "most": max(found), **vars(asked)}
        result |= {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps(result | {"jax": jax.__version__, "cores": os.cpu_count()}), flush=True)


if __name__ == "__main__":
    main()
