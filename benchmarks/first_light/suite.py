"""Everything that needs a GPU, in the order in which its answers matter, resumable in parts.

    python -m benchmarks.first_light --out out --require-kernels
    python -m benchmarks.first_light --out out2 --earlier out        # what is missing yet
    python -m benchmarks.first_light --out build/tiny --size tiny    # on any CPU

Needs jax, flax, optax, orbax, chex, numpy and pytest; `--wheels` names a folder with wheels of what
else is missing (jaxtyping). Each part runs in a process of its own with a time limit of its own.
What it measures is kept while it runs: a part that fails or is ended leaves that, and is run again
by the next call. No part is started after `--seconds`, and no part needs the file of another.

`--out` gets at most four files: `cases.jsonl` with a line for each comparison of a kernel with its
reference, `results.json` with the result of each part, `slots.npz` with recorded slots, and
`running.json`, what a part had measured when the whole suite was ended.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import processes
from benchmarks.first_light.files import read_lines, read_object
from benchmarks.options import parse
from benchmarks.processes import ROOT

LIMITS = {"cases": 420, "train_step": 480, "parity": 540}
"""Seconds that a part may take; others have `DEFAULT_LIMIT`."""
DEFAULT_LIMIT = 240
CASES, RESULTS, RUNNING, SLOTS = "cases.jsonl", "results.json", "running.json", "slots.npz"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Runs the parts that are not done."""

    out: Path
    """Folder for the results."""
    earlier: Path | None = None
    """Folder of an earlier call; its results are taken over."""
    size: Literal["tiny", "paper"] = "paper"
    """paper: the paper's widths on a GPU; tiny: some minutes of a CPU."""
    parts: tuple[str, ...] = ()
    """Names of the parts to run; none: all."""
    again: tuple[str, ...] = ()
    """Beginnings of the names of parts and cases to run again though they are done."""
    seconds: float = 570
    """No part is started after so many seconds, and the one that runs then is ended."""
    part_seconds: float | None = None
    """Seconds that each part may take; None: as `LIMITS` says."""
    require_kernels: bool = False
    """Fails the training steps' part if an operation ran as plain JAX."""
    reference: tuple[str, ...] = ()
    """Operations to run as plain JAX, for example value_scan or chunk_gated_delta_rule."""
    jobs: int = 4
    """Comparisons with references that run at the same time."""
    wheels: Path | None = None
    """Folder with wheels of packages that this Python lacks."""
    cache: Path = ROOT / "build" / "first_light"
    """Folder for compiled programs and unpacked wheels, to keep from one call to the next."""
    peer: Path | None = None
    """Checkout of the authors' repository, timed beside the memory."""
    peer_python: Path | None = None
    """Python with torch, triton and numpy, for `--peer`."""
    peer_fla: Path | None = None
    """Python with flash-linear-attention, timed beside the gated delta rule."""
    peer_titans: Path | None = None
    """Python with titans-pytorch, timed beside the memory block."""


def parts(options: Options) -> dict[str, list[str]]:
    """Each part's module and arguments, in the order they run; `OUT` is its file."""
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
    slots = options.out / SLOTS
    steps = ["--rounds", "2", "--profile", "25", "--record", str(slots)]
    if options.require_kernels:
        steps += ["--require-kernels"]
    recorded = ["--stream", str(slots)] if slots.exists() else []
    return {
        "cases": program("first_light.correctness", *size, "--jobs", str(options.jobs)),
        "train_step": program("speed.train_step", *size, *few, *steps),
        "rows": program("kernels.rows", *size, *few, *recorded),
        "selection": program("kernels.selection", *size, *few),
        "gated_delta": program("kernels.gated_delta", *few, *rule),
        "memory": program("speed.memory", *few, *memory),
        "layer": program("speed.layer", *few, *layer),
        "decode": program("speed.decode", *size),
        "determinism": program("kernels.determinism", *size),
        "parity": program("kernels.parity"),
    }


def variables(options: Options) -> dict[str, str]:
    """What the parts find in their environment: packages, and the cache of compiled programs."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if options.wheels is not None:
        paths.insert(1, str(unpack(options.wheels, options.cache / "packages")))
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_COMPILATION_CACHE_DIR": str(options.cache.absolute() / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    if options.reference:
        found["PALLAS_KERNELS_REFERENCE"] = ",".join(options.reference)
    return found


def unpack(wheels: Path, folder: Path) -> Path:
    """Unpacks every wheel of a folder; needs neither pip nor an index.

    Raises:
      SystemExit: the folder has no wheels.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"--wheels {wheels}: the folder has no files *.whl.")
    for file in files:
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(folder)
    return folder.absolute()


def run_part(
    command: Sequence[str], *, limit_s: float, added: Mapping[str, str] | None = None
) -> str | None:
    """Runs a part; None, or how it failed. A part that takes too long ends with its children.

    What the part prints is printed as it comes, and its last line ends the reason of a failure.
    """
    with tempfile.TemporaryFile() as log:
        run = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=os.environ | dict(added or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        shown, stop = 0, time.perf_counter() + limit_s
        try:
            while True:
                over = run.poll() is not None
                shown = _show(log.fileno(), shown)
                if over or time.perf_counter() > stop:
                    break
                time.sleep(0.2)
        except BaseException:
            processes.end(run)
            raise
        if not over:
            processes.end(run)
            return f"ended after its {limit_s:g} s"
        if run.returncode == 0:
            return None
        return processes.how_it_ended(
            run.returncode, os.pread(log.fileno(), shown, 0).decode(errors="replace")
        )


def _show(log: int, start: int) -> int:
    """Prints what a part wrote after `start`; returns where that ends."""
    while written := os.pread(log, 2**16, start):
        sys.stdout.write(written.decode(errors="replace"))
        start += len(written)
    sys.stdout.flush()
    return start


def take_over(options: Options) -> dict[str, Any]:
    """The results so far, of this folder and of the earlier one, without what is to run again."""
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    lines: dict[str, Any] = {}
    for folder in filter(None, (options.earlier, options.out)):
        results |= read_object(folder / RESULTS)
        lines |= {row["case"]: row for row in read_lines(folder / CASES)}
        slots = options.out / SLOTS
        if (folder / SLOTS).exists() and not slots.exists():
            shutil.copyfile(folder / SLOTS, slots)
    anew = tuple(options.again)
    results = {
        name: found for name, found in results.items() if not (anew and name.startswith(anew))
    }
    kept = [row for name, row in lines.items() if not (anew and name.startswith(anew))]
    if "cases" in anew:
        kept = []
    if len(kept) < len(lines):
        results.pop("cases", None)
    if lines:
        (options.out / CASES).write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    return results


def save(options: Options, results: Mapping[str, Any]) -> None:
    partial = options.out / f"{RESULTS}.partial"
    partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    partial.replace(options.out / RESULTS)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    unknown = set(options.parts) - set(parts(options))
    if unknown:
        raise SystemExit(
            f"--parts: no such part: {sorted(unknown)}; there are {list(parts(options))}."
        )
    results, added = take_over(options), variables(options)
    running = options.out / RUNNING
    save(options, results)
    failed, start = [], time.perf_counter()
    for name in options.parts or parts(options):
        if results.get(name, {}).get("status") == "done":
            print(f"{name}: done before")
            continue
        began = time.perf_counter()
        left = options.seconds - (began - start)
        if left <= 0:
            print(f"{name}: not started, {options.seconds:.0f} s are over; run the command again.")
            failed.append(name)
            continue
        is_cases = name == "cases"
        file = options.out / CASES if is_cases else running
        # The list anew: a part may have recorded the slots that a later one reads.
        command = [str(file) if a == "OUT" else a for a in parts(options)[name]]
        limit = options.part_seconds or LIMITS.get(name, DEFAULT_LIMIT)
        failure = run_part(command, limit_s=min(limit, left), added=added)
        row: dict[str, Any] = {"status": failure or "done", "seconds": time.perf_counter() - began}
        row["result"] = _counts(read_lines(file)) if is_cases else read_object(file)
        results[name] = row
        save(options, results)
        running.unlink(missing_ok=True)
        if failure is not None:
            failed.append(name)
        print(f"{name}: {row['status']}, {row['seconds']:.0f} s", flush=True)
    return 1 if failed else 0


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    verdicts = [row["verdict"] for row in rows]
    return {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}


if __name__ == "__main__":
    sys.exit(main())
