"""Everything that needs a GPU in one command, resumable in parts.

    python benchmarks/gpu_suite.py --out benchmarks/results/h100 \\
        --peer CHECKOUT --peer-python TORCH_PYTHON --peer-fla FLA_PYTHON \\
        --peer-titans TITANS_PYTHON

Each part runs in a process of its own and leaves one JSON file; a part whose file is there is not
run again, and none is started after `--seconds`. So a session that ends early is continued by the
same command. `--size tiny` runs the same parts on a CPU: row kernels interpreted, the
kernels' tests on the device skipped.
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
    """paper: the paper's widths on a GPU; tiny: some two minutes of a CPU."""
    parts: tuple[str, ...] = ()
    """Names of the parts to run; none: all."""
    seconds: float = 540
    """No part is started after so many seconds."""
    peer: Path | None = None
    """Checkout of the authors' repository, timed beside the memory."""
    peer_python: Path | None = None
    """Python with torch, triton and numpy, for `--peer`."""
    peer_fla: Path | None = None
    """Python with flash-linear-attention, timed beside the gated delta rule."""
    peer_titans: Path | None = None
    """Python with titans-pytorch, timed beside the memory block."""


def parts(options: Options) -> dict[str, list[str]]:
    """Each part's command after the interpreter, shortest first; `OUT` is its JSON file."""
    tiny = options.size == "tiny"
    size, json_out = ["--size", options.size], ["--out", "OUT"]
    stream = options.out / "slots.npz"
    few = ["--repeats", "2" if tiny else "10"]

    def script(name: str, *arguments: str) -> list[str]:
        return [str(HERE / f"{name}.py"), *arguments, *json_out]

    widths = ["--dim", "32", "--length", "256", "--backward_length", "128", "--chunk_size", "64"]
    if tiny:
        memory = ["--subkeys", "8", "--peer_subkeys", "8", "--batch", "1", *widths]
        layer = ["--subkeys", "8", "--batch", "1", "--model_dim", "32", *widths]
    else:
        memory = ["--subkeys", "128", "512", "1024", "--batch", "8", "--backward_length", "4096"]
        layer = [*memory, "--chunk_size", "512"]
        memory += ["--peer_subkeys", "512"]
    memory += ["--allocators", "default"]  # The allocators of the host do not matter on a GPU.
    if options.peer is not None:
        memory += ["--peer", str(options.peer)]
        if options.peer_python is not None:
            memory += ["--peer-python", str(options.peer_python)]
    if options.peer_titans is not None:
        layer += ["--peer-titans", str(options.peer_titans)]
        layer += ["--peer-chunks", *(["16", "64"] if tiny else ["64", "512"])]
    rule = ["--shapes", "tiny", "--backends", "reference"] if tiny else []
    if options.peer_fla is not None:
        rule += ["--peer-fla", str(options.peer_fla)]
    recorded = ["--stream", str(stream)] if stream.exists() else []
    return {
        "determinism": script("determinism", *size),
        "train_step": script("train_step", *size, *few, "--record", str(stream)),
        "decode": script("decode", *size),
        "kernels": script("kernels", *size, *few, *(() if tiny else recorded)),
        "gated_delta": script("gated_delta", *few, *rule),
        "layer": script("layer", *few, *layer),
        "memory": script("memory", *few, *memory),
        "parity": [str(HERE / "device_tests.py"), *json_out],
    }


def main(options: Options) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    unknown = set(options.parts) - set(parts(options))
    if unknown:
        raise SystemExit(f"No such part: {sorted(unknown)}; there are {list(parts(options))}.")
    failed, start = [], time.perf_counter()
    for name in options.parts or parts(options):
        result = options.out / f"{name}.json"
        if result.exists():
            print(f"{name}: done before, {result}")
            continue
        if time.perf_counter() - start > options.seconds:
            print(f"{name}: not started, {options.seconds:.0f} s are over; run the command again.")
            failed.append(name)
            continue
        began = time.perf_counter()
        partial = result.with_suffix(".partial")
        # Asked for again: a stream that an earlier part recorded is there by now.
        command = [str(partial) if a == "OUT" else a for a in parts(options)[name]]
        run = subprocess.run([sys.executable, *command], check=False)
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
