"""Training of a study's runs, and their lines of JSON in a file that later calls continue."""

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import environment_once


def make_lines(
    runs: Sequence[str],
    kinds: Collection[str],
    out: Path,
    make: Callable[[str, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Appends the line of each run that `out` does not have yet; all lines of the file.

    Args:
      runs: names, KIND:SEED.
      kinds: known kinds.
      out: file of the lines, each with its `run`.
      make: trains and evaluates one kind and seed, and returns the line; where it ran is added.

    Raises:
      SystemExit: a name is no KIND:SEED.
    """
    asked = [(run, *run.partition(":")[::2]) for run in runs]
    unknown = [run for run, kind, seed in asked if kind not in kinds or not seed.isdigit()]
    if unknown:
        raise SystemExit(f"--runs: {unknown} are no KIND:SEED; kinds are {tuple(kinds)}.")
    lines: dict[str, dict[str, Any]] = {}
    if out.exists():
        lines = {x["run"]: x for x in map(json.loads, out.read_text().splitlines())}
    out.parent.mkdir(parents=True, exist_ok=True)
    for run, kind, seed in asked:
        if run in lines:
            continue
        lines[run] = make(kind, int(seed)) | {"environment": environment_once()}
        with out.open("a") as file:
            file.write(json.dumps(lines[run]) + "\n")
    return list(lines.values())


def train_run(
    directory: Path, arguments: Sequence[str], *, seed: int, text: Path | None, extra: Sequence[str]
) -> None:
    """Trains a run with `fwpkm train`, or what is left of it.

    Args:
      directory: of the run.
      arguments: the config and options of `fwpkm train`.
      seed: of weights and rows.
      text: folder of train.jsonl and valid.jsonl; None: the config's own data.
      extra: more options as NAME=VALUES without dashes.

    Raises:
      SystemExit: one of `extra` has no `=`.
    """
    if (directory / "results.json").exists():
        return
    command = [*arguments, "--seed", str(seed), "--run_dir", str(directory)]
    if text is not None:
        for split in ("train", "valid"):
            command += [f"--data.{split}_paths", str(text / f"{split}.jsonl")]
    for option in extra:
        name, equals, values = option.partition("=")
        if not equals:
            raise SystemExit(f"--extra: {option!r} is no NAME=VALUES.")
        command += [f"--{name}", *values.split()]
    subprocess.run([sys.executable, "-m", "fwpkm_jax", "train", *command], check=True)


def metrics(directory: Path) -> list[dict[str, Any]]:
    """What a run logged while it trained, step by step."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def trained_loss(directory: Path) -> float:
    """Mean loss in nats of the last tenth of the training steps, of data that was new then."""
    losses = [line["loss"] for line in metrics(directory) if "loss" in line]
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))
