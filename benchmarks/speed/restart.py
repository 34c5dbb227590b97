"""Times commands from their start to their first result: compiled for the first time, and again.

    python -m benchmarks.speed.restart --out benchmarks/results/restart_cpu.json

A user waits for three things: the first step of `fwpkm train`, the first token of `fwpkm generate`,
and, when everything was quit and started again, the first answer of a saved memory. Each command
runs in a new process with an empty folder of compiled programs, then again with what is kept there.
The last one answers from a memory that its first process saved. `first_seconds` ends with the first
line that says the result (a step's loss, or the text), `seconds` when the command ends, which has
saved by then. `processor_seconds` of all cores does not depend on other work of the machine.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import environment, settings, write_result
from benchmarks.options import parse
from benchmarks.processes import ROOT, how_it_ended

VARIABLE = "FWPKM_JAX_CACHE"
PROMPT = "The old man looked at the sea and said that "


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times the first step, token and answer of a config that is trained on text."""

    config: str = "books_tiny"
    """A shipped config's name or a config file."""
    overrides: tuple[str, ...] = ()
    """Further `NAME=VALUE` options of `fwpkm train`, for example `data.length=64`."""
    new_tokens: int = 1
    """Tokens of an answer."""
    repeats: int = 3
    """Restarts of each command; the fastest is reported."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def timed(arguments: Sequence[str], *, first: str, cache: Path) -> dict[str, Any]:
    """Seconds of `fwpkm ARGUMENTS` until the first line that has `first`, and until its end.

    Raises:
      RuntimeError: the command failed, or printed no such line.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    added = {VARIABLE: str(cache), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    given = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    began, seen = time.perf_counter(), None
    with tempfile.TemporaryFile("w+") as errors:
        run = subprocess.Popen(
            [sys.executable, "-m", "fwpkm_jax", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=given | added,
        )
        assert run.stdout is not None
        with run.stdout:
            for line in run.stdout:
                if seen is None and first in line:
                    seen = time.perf_counter() - began
        _, status, used = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        errors.seek(0)
        written = errors.read()
    command = f"fwpkm {' '.join(arguments)}"
    if run.returncode:
        raise RuntimeError(f"{command}: {how_it_ended(run.returncode, written)}")
    if seen is None:
        raise RuntimeError(f"{command}: printed no line with {first!r}.")
    processor = used.ru_utime + used.ru_stime
    return {"first_seconds": seen, "seconds": seconds, "processor_seconds": processor}


def measure(options: Options, folder: Path) -> list[dict[str, Any]]:
    """A row for each command and state of the compiled programs."""
    run = folder / "run"
    train = ["train", options.config, "--training.steps", "1"]
    for override in options.overrides:
        name, _, value = override.partition("=")
        train += [f"--{name}", value]
    generate = ["generate", str(run), "--prompt", PROMPT, "--max-new-tokens"]
    generate += [str(options.new_tokens)]
    commands = {
        "first step": (train, "step 1/1"),
        "first token": (generate, PROMPT),
        "first answer of a saved memory": ([*generate, "--memory", "reader"], PROMPT),
    }
    rows = []
    for number, (what, (arguments, first)) in enumerate(commands.items()):
        cache, times = folder / f"cache_{number}", []
        for turn in range(1 + options.repeats):
            if what == "first step":  # A restart of the program, not the continuation of its run.
                arguments = [*train, "--run-dir", str(run if turn == 0 else folder / f"run_{turn}")]
            times.append(timed(arguments, first=first, cache=cache))
        rows.append({"what": what, "programs": "compiled", **times[0]})
        found = {"what": what, "programs": "found again"}
        rows.append(found | {name: min(one[name] for one in times[1:]) for name in times[0]})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    result = {"environment": environment(), "options": settings(options), "rows": rows}
    write_result(result, options.out)


if __name__ == "__main__":
    main()
