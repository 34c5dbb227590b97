"""Peak memory and seconds of `fwpkm import hf`, on one device and on simulated ones.

    python -m benchmarks.speed.import_folder

A Qwen3.5 folder of random bfloat16 weights is made, then imported by a process of its own for each
number of devices, whose parts of a model lie along `fsdp`. `read` ends with the weights on their
devices, `import` with the run on disk. Peaks are those of the process above what it takes after it
has loaded the libraries. What the system's cache of files does is part of the times.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.machine import environment, peak_host_megabytes, settings, write_result
from benchmarks.options import parse
from benchmarks.processes import run_worker
from fwpkm_jax.interchange.hf import import_model, model_config
from fwpkm_jax.interchange.hf.families import FAMILIES, text_config
from fwpkm_jax.interchange.hf.layout import parts
from fwpkm_jax.interchange.hf.model_folder import open_folder, read_weights
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.training.sharding import make_partition

_NAME = "benchmarks.speed.import_folder"
_DRAWN = 1 << 20  # Random numbers, which every tensor repeats.


@dataclass(frozen=True, kw_only=True)
class Options:
    """Imports a folder of random weights."""

    layers: int = 16
    """Blocks; every fourth has attention, the others Gated DeltaNet."""
    width: int = 2048
    """Of the residual stream, a multiple of 64."""
    vocab: int = 32768
    """Rows of the embedding and of the head."""
    devices: tuple[int, ...] = (1, 8)
    """Numbers of devices to import onto."""
    out: Path | None = None
    """File of the results."""


def configuration(options: Options) -> dict[str, Any]:
    """`config.json` of the folder."""
    heads, head_dim = 8, options.width // 8
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": options.vocab,
        "hidden_size": options.width,
        "intermediate_size": 3 * options.width,
        "num_hidden_layers": options.layers,
        "layer_types": [
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(options.layers)
        ],
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def make_folder(options: Options, folder: Path) -> dict[str, int]:
    """Writes the folder, a file per block; numbers of the model and its largest tensor."""
    values = configuration(options)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    text, config = text_config(values), model_config(values)
    drawn = np.random.default_rng(0).normal(0, 0.02, _DRAWN).astype(ml_dtypes.bfloat16)
    files: dict[str, dict[str, np.ndarray]] = {}
    for ours, part in parts(config, FAMILIES[text["model_type"]]).items():
        file = "-".join(ours.split("/")[1:3]) if "blocks" in ours else "rest"
        for name, shape in zip(part.names, part.shapes, strict=True):
            held = files.setdefault(f"model-{file}.safetensors", {})
            held[name] = np.resize(drawn, shape)
    places, total, largest = {}, 0, 0
    for file, held in files.items():
        save_file(held, folder / file)
        places |= dict.fromkeys(held, file)
        total += sum(x.size for x in held.values())
        largest = max(largest, *(x.size for x in held.values()))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return {"parameters": total, "largest": largest}


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Makes the folder, reads it, or imports it; what it took."""
    folder = Path(task["folder"])
    if task["step"] == "make":
        return make_folder(Options(**task["options"]), folder)
    jax.block_until_ready(jax.numpy.zeros(len(jax.devices())))
    libraries = peak_host_megabytes()
    mesh = MeshConfig() if task["devices"] == 1 else MeshConfig(fsdp=task["devices"])
    began = time.perf_counter()
    if task["step"] == "read":
        weights = read_weights(open_folder(folder), partition=make_partition(mesh))
        jax.block_until_ready(weights.params)
    else:
        with tempfile.TemporaryDirectory(dir=folder.parent) as run:
            import_model(folder, run, mesh=mesh, say=lambda _: None)
    seconds = round(time.perf_counter() - began, 2)
    return {"seconds": seconds, "peak_megabytes": peak_host_megabytes() - libraries}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the rows."""
    options = parse(Options, argv, description=__doc__)
    rows: list[dict[str, Any]] = []
    sizes = {name: getattr(options, name) for name in ("layers", "width", "vocab")}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        folder.mkdir()
        task = {"folder": str(folder), "step": "make", "options": sizes}
        made = run_worker(_NAME, task)
        model, largest = (2 * made[name] / 1e6 for name in ("parameters", "largest"))
        print(f"{made['parameters']:,} parameters, {model:,.0f} MB; tensors to {largest:,.0f} MB")
        for devices in options.devices:
            flags = f"--xla_force_host_platform_device_count={devices}"
            for step in ("read", "import"):
                task = {"folder": str(folder), "step": step, "devices": devices}
                row = run_worker(_NAME, task, variables={"XLA_FLAGS": flags})
                rows.append({"devices": devices, "step": step, **row})
                print(
                    f"{devices} devices, {step}: {row['seconds']} s, peak "
                    f"{row['peak_megabytes']:,.0f} MB, {row['peak_megabytes'] - model:,.0f} above "
                    "the model",
                    flush=True,
                )
    result = {"settings": settings(options), "machine": environment(), **made}
    write_result({**result, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
