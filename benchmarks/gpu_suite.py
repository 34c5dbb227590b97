"""Everything that needs a GPU in one command, resumable in parts.

    python -m benchmarks.gpu_suite --out benchmarks/results/h100 --require-kernels \\
        --peer CHECKOUT --peer-python TORCH_PYTHON --peer-fla FLA_PYTHON \\
        --peer-titans TITANS_PYTHON

Each part runs in a process of its own with a time limit of its own and leaves one JSON file,
`PART.json`. A part whose file is there is not run again, and none is started after `--seconds`, so
the same command continues a session that ended early. Parts write their results as they go: one
that fails or is ended leaves what it measured in `PART.unfinished.json`, and is run again by the
next call. No part needs the file of another. `--size tiny` runs the same parts on a CPU: row
kernels are interpreted, and the kernels' tests on the device skipped.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.options import parse
from benchmarks.processes import ROOT

LIMITS = {"determinism": 120, "train_step": 480, "parity": 540}
"""Seconds that a part may take; others have `DEFAULT_LIMIT`."""
DEFAULT_LIMIT = 240


@dataclass(frozen=True, kw_only=True)
class Options:
    """Runs the parts that are not done."""

    out: Path
    """Folder for the results."""
    size: Literal["tiny", "paper"] = "paper"
    """paper: the paper's widths on a GPU; tiny: some minutes of a CPU."""
    parts: tuple[str, ...] = ()
    """Names of the parts to run; none: all."""
    seconds: float = 570
    """No part is started after so many seconds, and the one that runs then is ended."""
    part_seconds: float | None = None
    """Seconds that each part may take; None: as `LIMITS` says."""
    require_kernels: bool = False
    """Fails the training steps' part if an operation ran as plain JAX."""
    stream: Path | None = None
    """Recorded slots for the row kernels; the training steps' part records `OUT/slots.npz`."""
    peer: Path | None = None
    """Checkout of the authors' repository, timed beside the memory."""
    peer_python: Path | None = None
    """Python with torch, triton and numpy, for `--peer`."""
    peer_fla: Path | None = None
    """Python with flash-linear-attention, timed beside the gated delta rule."""
    peer_titans: Path | None = None
    """Python with titans-pytorch, timed beside the memory block."""


def parts(options: Options) -> dict[str, list[str]]:
    """Each part's module and arguments, in the order they run; `OUT` is its JSON file."""
    tiny = options.size == "tiny"
    size, json_out = ["--size", options.size], ["--out", "OUT"]
    few = ["--repeats", "2" if tiny else "10"]

    def program(name: str, *arguments: str) -> list[str]:
        return [f"benchmarks.{name}", *arguments, *json_out]

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
    steps = ["--rounds", "2", "--record", str(options.out / "slots.npz")]
    if options.require_kernels:
        steps += ["--require-kernels"]
    recorded = [] if options.stream is None else ["--stream", str(options.stream)]
    return {
        "determinism": program("kernels.determinism", *size),
        "train_step": program("speed.train_step", *size, *few, *steps),
        "decode": program("speed.decode", *size),
        "rows": program("kernels.rows", *size, *few, *recorded),
        "gated_delta": program("kernels.gated_delta", *few, *rule),
        "layer": program("speed.layer", *few, *layer),
        "memory": program("speed.memory", *few, *memory),
        "parity": program("kernels.parity"),
    }


def run_part(command: Sequence[str], *, limit_s: float) -> str | None:
    """Runs a part; None, or how it failed. A part that takes too long ends with its children."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": paths}
    run = subprocess.Popen([sys.executable, "-m", *command], env=variables, start_new_session=True)
    try:
        code = run.wait(timeout=limit_s)
    except BaseException as error:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"ended after its {limit_s:.0f} s"
    return None if code == 0 else f"failed with exit code {code}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    options.out.mkdir(parents=True, exist_ok=True)
    every = parts(options)
    unknown = set(options.parts) - set(every)
    if unknown:
        raise SystemExit(f"--parts: no such part: {sorted(unknown)}; there are {list(every)}.")
    failed, start = [], time.perf_counter()
    for name in options.parts or every:
        result = options.out / f"{name}.json"
        if result.exists():
            print(f"{name}: done before, {result}")
            continue
        began = time.perf_counter()
        left = options.seconds - (began - start)
        if left <= 0:
            print(f"{name}: not started, {options.seconds:.0f} s are over; run the command again.")
            failed.append(name)
            continue
        unfinished = result.with_suffix(".unfinished.json")
        command = [str(unfinished) if a == "OUT" else a for a in every[name]]
        limit = options.part_seconds or LIMITS.get(name, DEFAULT_LIMIT)
        failure = run_part(command, limit_s=min(limit, left))
        if failure is None:
            json.loads(unfinished.read_text(encoding="utf-8"))
            unfinished.rename(result)
            print(f"{name}: {time.perf_counter() - began:.0f} s, {result}", flush=True)
        else:
            failed.append(name)
            kept = f"; {unfinished} has what it measured" if unfinished.exists() else ""
            print(f"{name}: {failure}{kept}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
