"""Everything that needs a GPU in one command, resumable in parts.

    python benchmarks/gpu_suite.py --out benchmarks/results/h100

Each part runs in a process of its own and leaves one JSON file; a part whose file is there is not
run again. `--size tiny` runs the same parts on a CPU.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Runs the parts that are not done."""

    out: Path
    """Folder for the results."""
    size: Literal["tiny", "paper"] = "paper"
    """paper: the paper's widths on a GPU; tiny: seconds on a CPU."""


def parts(options: Options) -> dict[str, list[str]]:
    """Each part's command; its results go to a JSON file of its name."""
    tiny = options.size == "tiny"
    widths = ["--dim", "32", "--model_dim", "32", "--length", "256", "--backward_length", "128"]
    layer = ["--batch", "8", "--chunk_size", "512", "--backward_length", "4096"]
    small = ["--subkeys", "8", "16", "--batch", "1", "--chunk_size", "64", *widths]
    paper = ["--subkeys", "128", "512", "1024", *layer]
    return {
        "determinism": ["determinism.py", "--size", options.size],
        "layer": ["layer.py", "--repeats", "2" if tiny else "20", *(small if tiny else paper)],
        "train_step": ["train_step.py", "--size", options.size, "--repeats", "2" if tiny else "10"],
    }


def main(options: Options) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, command in parts(options).items():
        result = options.out / f"{name}.json"
        if result.exists():
            print(f"{name}: done before, {result}")
            continue
        began = time.perf_counter()
        script, *arguments = command
        partial = result.with_suffix(".partial")
        run = subprocess.run(
            [sys.executable, str(HERE / script), *arguments, "--out", str(partial)], check=False
        )
        if run.returncode:
            failed.append(name)
            print(f"{name}: failed with exit code {run.returncode}")
            continue
        json.loads(partial.read_text(encoding="utf-8"))
        partial.rename(result)  # A part that was cut short leaves no result.
        print(f"{name}: {time.perf_counter() - began:.0f} s, {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
