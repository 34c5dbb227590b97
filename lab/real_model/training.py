"""Trains the shipped memory of SmolLM2 further, by the library, on made sessions.

    python -m lab.real_model.training --sessions SESSIONS.npz --base BASE --run RUN --out OUT

Puts the memory into BASE (the model by `fwpkm import gguf`), trains it alone on the rows of
`made_sessions` until the seconds are over, and writes the average of its weights to OUT as
`memory.safetensors`, with the run's metrics.
"""

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.options import parse
from fwpkm_jax import MemoryConfig, train
from fwpkm_jax.interchange import smollm2
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.io.safetensors import SafetensorsFile
from fwpkm_jax.run.load import load_run
from lab.real_model import made_sessions


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains on sessions."""

    sessions: Path
    """File of `made_sessions`."""
    base: Path
    """Run of the model."""
    weights: Path | None = None
    """The memory's weights to begin with; None: the shipped ones."""
    run: Path = Path("runs/real_model")
    """Directory of the training run."""
    out: Path = Path("out")
    """Folder for the trained weights and metrics."""
    steps: int = 10**6
    """Steps, at most."""
    seconds: float = 300.0
    """Training ends after so many, compilation included."""
    batch: int = 32
    """Sessions of a step."""
    rate: float = 1e-3
    """Learning rate, constant after 50 steps: the average of the weights needs no decay."""
    address: float = 0.5
    """Weight of the address loss."""
    dtype: str = "bfloat16"
    """Of the model's activations and frozen weights; the memory's are float32."""
    seed: int = 0
    """Of everything drawn."""


def train_memory(options: Options) -> dict[str, Any]:
    """Trains the memory; what of the run is reported."""
    began = time.time()
    start = options.run / "start"
    rule = dataclasses.replace(
        smollm2.MEMORY.rule, retention=None
    )  # Trained without it, used with it.
    memory = dataclasses.replace(smollm2.MEMORY, rule=rule)
    smollm2.with_memory(options.base, start, weights=options.weights, memory=memory)
    of_start = load_run(start).experiment
    with np.load(options.sessions) as arrays:
        labels = arrays["loss_weight"].shape[1]
    experiment = dataclasses.replace(
        of_start,
        base=str(start),
        run_dir=str(options.run / "trained"),
        seed=options.seed,
        data=made_sessions.MadeSessions(
            length=labels, file=str(options.sessions), vocabulary=of_start.model.vocab_size
        ),
        model=dataclasses.replace(
            of_start.model, activation_dtype=options.dtype, parameter_dtype=options.dtype
        ),
        optimizer=dataclasses.replace(
            of_start.optimizer,
            train=(".*/memory.*/.*",),
            schedule="constant",
            learning_rate=options.rate,
            warmup_steps=50,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            ema=0.998,
        ),
        training=dataclasses.replace(
            of_start.training,
            steps=options.steps,
            batch_size=options.batch,
            log_every=20,
            validate_every=500,
            validation_batches=made_sessions.VALIDATION // options.batch,
            memory=MemoryConfig(
                groups=options.batch, lifetime="batch", address_loss=options.address
            ),
        ),
        checkpoint=dataclasses.replace(of_start.checkpoint, every=500, keep=2),
        log=(),
    )
    left = max(1.0, options.seconds - (time.time() - began))
    timer = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    result = train(experiment)
    timer.cancel()
    if not result.step:
        raise SystemExit(f"--seconds {options.seconds:g} ended before the first step; raise it.")
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(options.run / "trained" / "metrics.jsonl", options.out / "metrics.jsonl")
    arrays = dict(Weights(load_run(options.run / "trained", weights="ema").params, {}).named())
    arrays = {name: np.asarray(x) for name, x in arrays.items() if "/memory" in name}
    stored = SafetensorsFile(options.weights or smollm2.FOLDER / "memory.safetensors")
    arrays |= {name: stored.read(name) for name in stored if name not in arrays}  # Sub-keys.
    save_file(arrays, options.out / "memory.safetensors")
    return {"steps": result.step, "seconds": round(time.time() - began, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    print(json.dumps(train_memory(parse(Options, argv))))


if __name__ == "__main__":
    main()
