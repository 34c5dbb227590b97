"""Memory of a training job whose text is read while it trains.

    python -m benchmarks.speed.streaming --gigabytes 10

Text is generated into compressed JSON lines, JSON lines, and Parquet, a third each, of `files`
files. A process of its own then trains a tiny model of bytes on their mixture, once over, with
checkpoints. Its resident memory is read from the system as it goes: what it takes at a tenth of
the text is what it takes at the end. `--reading memory` shows the same job with text in memory.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet

from benchmarks.machine import environment, settings, write_result
from benchmarks.options import parse
from benchmarks.processes import run_worker
from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData, make_dataset
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.models.language_model import ModelConfig
from fwpkm_jax.run.train import train
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig
from fwpkm_jax.training.config import TrainingConfig
from fwpkm_jax.training.state import MemoryConfig

_NAME = "benchmarks.speed.streaming"
_DOCUMENT = 4000  # Bytes.
_BLOCK = 2**23


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains on generated text that is read while training."""

    gigabytes: float = 10.0
    """Text in all, in units of 1e9 bytes."""
    files: int = 30
    """Files of the text."""
    batch_size: int = 512
    """Rows of a step."""
    length: int = 128
    """Tokens of a row: bytes."""
    window: int = 8192
    """Rows that are shuffled at a time."""
    job: Literal["train", "read"] = "train"
    """train: a tiny model reads every batch. read: the batches are made, and no model reads."""
    limit_s: float | None = None
    """Seconds after which the job is stopped; None: it reads the whole text once."""
    reading: Literal["stream", "memory"] = "stream"
    """When text is read."""
    out: Path | None = None
    """File of the results."""


def documents(total: int, *, seed: int) -> list[str]:
    """Documents of random words, of `total` bytes with the end that follows each."""
    rng = np.random.default_rng(seed)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(5000)]
    text = " ".join(words[i] for i in rng.integers(0, len(words), total // 5))
    size = _DOCUMENT - 1
    return [text[at : at + size] for at in range(0, total - size, _DOCUMENT)]


def write_texts(options: Options, folder: Path) -> int:
    """Writes the files; the bytes of text in all of them."""
    each, written = int(options.gigabytes * 1e9 / options.files), 0
    drawn = documents(min(_BLOCK, each), seed=0)
    for number in range(options.files):
        block = [f"{number} {x}" for x in drawn]
        size = sum(len(x) for x in block)
        times = max(round(each / size), 1)
        written += size * times
        kind = number % 3
        lines = "".join(json.dumps({"text": x}) + "\n" for x in block).encode()
        if kind == 0:
            with gzip.open(folder / f"{number:04}.jsonl.gz", "wb", compresslevel=1) as file:
                for _ in range(times):
                    file.write(lines)
        elif kind == 1:
            with (folder / f"{number:04}.jsonl").open("wb") as file:
                for _ in range(times):
                    file.write(lines)
        else:
            table = pyarrow.table({"text": block})
            path = folder / f"{number:04}.parquet"
            with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
                for _ in range(times):
                    writer.write_table(table)
    return written


def experiment(options: Options, folder: Path, total: int) -> Experiment:
    """The job that reads the text once."""
    heads = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8, rotary_fraction=0.5)
    steps = max(total // (options.batch_size * (options.length + 1)), 10)
    return Experiment(
        model=ModelConfig(
            vocab_size=257,
            model_dim=8,
            mixers=("swa",),
            window=8,
            mlp_dim=8,
            memory_layers=(),
            attention=heads,
            activation_dtype="float32",
        ),
        data=TextData(
            train_paths=(str(folder / "texts"),),
            length=options.length,
            reading=options.reading,
            window=options.window,
            packing="documents",
        ),
        training=TrainingConfig(
            steps=steps,
            batch_size=options.batch_size,
            validation_batches=0,
            memory=MemoryConfig(groups=options.batch_size),
            log_every=max(steps // 20, 1),
        ),
        checkpoint=CheckpointConfig(every=max(steps // 10, 1)),
        log=(),
        run_dir=str(folder / "run"),
    )


def resident_megabytes() -> float:
    """Memory that this process has now, in units of 1e6 bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def train_for(job: Experiment, limit_s: float | None) -> int:
    """Trains; steps done when it ended, or was stopped as by a scheduler."""
    if limit_s is not None:
        timer = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
    return train(job, stream=io.StringIO()).step


def read_for(job: Experiment, limit_s: float | None) -> int:
    """Makes the batches of the job; their number."""
    batches = iter(
        make_dataset(job.data, split="train", batch_size=job.training.batch_size, seed=job.seed)
    )
    end = time.monotonic() + (limit_s or float("inf"))
    for step in range(job.training.steps):
        if time.monotonic() > end:
            return step
        next(batches)
        batches.get_state()
    return job.training.steps


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Trains; resident memory after each tenth of the steps."""
    options = Options(**task["options"])
    job = experiment(options, Path(task["folder"]), task["total"])
    at: list[tuple[float, float]] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            at.append((time.monotonic(), resident_megabytes()))

    before = resident_megabytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    try:
        steps = (train_for if options.job == "train" else read_for)(job, options.limit_s)
    finally:
        ended.set()
        watcher.join()
    seconds = time.monotonic() - began
    tenths = [
        max(x for when, x in at if (when - began) / seconds <= tenth / 10) for tenth in range(1, 11)
    ]
    return {
        "libraries_megabytes": before,
        "peak_megabytes": max(x for _, x in at),
        "peak_by_tenth_of_time_megabytes": [round(x, 1) for x in tenths],
        "seconds": seconds,
        "steps": steps,
        "bytes": steps * options.batch_size * (options.length + 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints what it measured."""
    options = parse(Options, argv, description=__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        began = time.monotonic()
        total = write_texts(options, folder / "texts")
        print(f"Wrote {total / 1e9:.2f} GB of text in {time.monotonic() - began:.0f} s.")
        task = {"options": settings(options), "folder": name, "total": total}
        found = run_worker(_NAME, task)
    result = {"settings": settings(options), "machine": environment(), **found}
    write_result(result, options.out)


if __name__ == "__main__":
    main()
