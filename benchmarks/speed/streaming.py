"""Memory of a training job whose text is read while it trains.

    python -m benchmarks.speed.streaming --gigabytes 10

Text is generated into compressed JSON lines, JSON lines, and Parquet, a third each, of `files`
files. A process of its own then trains a tiny model of bytes on their mixture, once over, with
checkpoints. Its resident memory is read from the system as it goes: what it takes at a tenth of
the text is what it takes at the end. `--reading memory` shows the same job with text in memory.

    python -m benchmarks.speed.streaming --tokens words --batch_size 32 --length 4096 --window 256

is the fast way through 10 GB: a token stands for 64 bytes, so the model has fewer of them to read.
`--lines FILE` keeps a line of bytes and memory every 10 s, of a run that is stopped too.
"""

from __future__ import annotations

import datetime
import gzip
import io
import json
import os
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from fwpkm_jax.training.state import MemoryConfig
from fwpkm_jax.training.training_config import TrainingConfig

_NAME = "benchmarks.speed.streaming"
_DOCUMENT = 4000  # Bytes.
_BLOCK = 2**23


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains on generated text that is read while training."""

    gigabytes: float = 10.0
    """Text in all, in units of 1e9 bytes."""
    tokens: Literal["bytes", "words"] = "bytes"
    """bytes: short words, a token for each byte. words: 60 words of 32 to 95 letters, a token for
    each, read by a tokenizer.json (extra hf)."""
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
    lines: Path | None = None
    """File to which a line of JSON is added every 10 s and at the end: time, machine, bytes read,
    memory."""


def documents(total: int, *, seed: int) -> list[str]:
    """Documents of random words, of `total` bytes with the end that follows each."""
    rng = np.random.default_rng(seed)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(5000)]
    text = " ".join(words[i] for i in rng.integers(0, len(words), total // 5))
    size = _DOCUMENT - 1
    return [text[at : at + size] for at in range(0, total - size, _DOCUMENT)]


def long_words() -> list[str]:
    """The words of `--tokens words`."""
    rng = np.random.default_rng(1)
    return ["".join(map(chr, rng.integers(97, 123, size))) for size in rng.integers(32, 96, 60)]


def documents_of_words(total: int, *, seed: int) -> list[str]:
    """Documents of long words, of about `total` bytes."""
    rng, words = np.random.default_rng(seed), long_words()
    ids = rng.integers(0, len(words), (max(total // _DOCUMENT, 1), _DOCUMENT // 64))
    return [" ".join(words[i] for i in row) for row in ids]


def write_tokenizer(folder: Path, names: Sequence[str]) -> Path:
    """A tokenizer.json whose tokens are the long words, and `names`."""
    words = ["</s>", "?", *names, *long_words()]
    end = {"id": 0, "content": "</s>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "WordLevel", "vocab": {x: i for i, x in enumerate(words)}, "unk_token": "?"}
    tokenizer = {"version": "1.0", "added_tokens": [end], "model": model}
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    return path


def write_texts(options: Options, folder: Path) -> tuple[int, int]:
    """Writes the files; bytes and tokens in all of them, an end after each document included."""
    each, written, tokens = int(options.gigabytes * 1e9 / options.files), 0, 0
    words = options.tokens == "words"
    drawn = (documents_of_words if words else documents)(min(_BLOCK, each), seed=0)
    for number in range(options.files):
        block = [f"{number} {x}" for x in drawn]
        size = sum(len(x) + 1 for x in block)
        times = max(round(each / size), 1)
        written += size * times
        tokens += times * (sum(len(x.split()) + 1 for x in block) if words else size)
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
    return written, tokens


def experiment(options: Options, folder: Path, tokens: int) -> Experiment:
    """The job that reads the text once."""
    heads = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8, rotary_fraction=0.5)
    steps = max(tokens // (options.batch_size * (options.length + 1)), 10)
    data = TextData(
        train_paths=(str(folder / "texts"),),
        length=options.length,
        reading=options.reading,
        window=options.window,
        packing="documents",
    )
    if options.tokens == "words":
        data = replace(data, tokenizer=str(folder / "tokenizer.json"))
    return Experiment(
        model=ModelConfig(
            vocab_size=data.vocab_size,
            model_dim=8,
            mixers=("swa",),
            window=8,
            mlp_dim=8,
            memory_layers=(),
            attention=heads,
            activation_dtype="float32",
        ),
        data=data,
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


def read_for(job: Experiment, limit_s: float | None, done: list[int]) -> int:
    """Makes the batches of the job, and keeps their number in `done`; their number."""
    batches = iter(
        make_dataset(job.data, split="train", batch_size=job.training.batch_size, seed=job.seed)
    )
    end = time.monotonic() + (limit_s or float("inf"))
    for step in range(job.training.steps):
        if time.monotonic() > end:
            return step
        next(batches)
        batches.get_state()
        done[0] = step + 1
    return job.training.steps


def steps_written(run_dir: str) -> int:
    """Steps that a run's metrics tell of so far."""
    try:
        return (Path(run_dir) / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Trains; resident memory after each tenth of the time, and of the steps as they are done."""
    options = Options(**task["options"])
    job = experiment(options, Path(task["folder"]), task["tokens"])
    bytes_of_step = options.batch_size * (options.length + 1) * task["bytes"] / task["tokens"]
    before, began = resident_megabytes(), time.monotonic()
    at = [(began, before)]
    ended, done = threading.Event(), [0]

    def line() -> dict[str, Any]:
        steps = steps_written(job.run_dir) if options.job == "train" else done[0]
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": round(os.getloadavg()[0], 1),
            "job": options.job,
            "seconds": round(at[-1][0] - began, 1),
            "steps": steps,
            "bytes": round(steps * bytes_of_step),
            "resident_megabytes": round(at[-1][1], 1),
            "highest_megabytes": round(max(x for _, x in at), 1),
        }

    def watch() -> None:
        told, running = began, True
        while running:
            running = not ended.wait(0.5)
            at.append((time.monotonic(), resident_megabytes()))
            if task["lines"] and (not running or at[-1][0] - told >= 10):
                told = at[-1][0]
                with Path(task["lines"]).open("a") as file:
                    file.write(json.dumps(line()) + "\n")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        if options.job == "train":
            steps = train_for(job, options.limit_s)
        else:
            steps = read_for(job, options.limit_s, done)
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
        "bytes": round(steps * bytes_of_step),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints what it measured."""
    options = parse(Options, argv, description=__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        began = time.monotonic()
        total, tokens = write_texts(options, folder / "texts")
        if options.tokens == "words":
            write_tokenizer(folder, [str(number) for number in range(options.files)])
        print(f"Wrote {total / 1e9:.2f} GB of text in {time.monotonic() - began:.0f} s.")
        task = {"options": settings(options), "folder": name, "bytes": total, "tokens": tokens}
        task["lines"] = str(options.lines.absolute()) if options.lines else None
        found = run_worker(_NAME, task)
    result = {"settings": settings(options), "machine": environment(), **found}
    write_result(result, options.out)


if __name__ == "__main__":
    main()
