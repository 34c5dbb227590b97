"""Compares every kernel with its reference, each case in a process of its own.

    python -m benchmarks.first_light.correctness --out cases.jsonl

A case that hangs, dies or gives wrong numbers costs its own process: one line says so, and the
others run. The file gets one line of JSON for each case, as soon as it has ended; cases that are in
the file are not run again.
"""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import processes
from benchmarks.first_light.files import read_lines
from benchmarks.options import parse

MODULE = "benchmarks.first_light.cases"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compares kernels with their references."""

    out: Path
    """File for the lines."""
    size: Literal["tiny", "paper"] = "paper"
    """paper: the paper's widths; tiny: small shapes for interpreted kernels."""
    jobs: int = 1
    """Cases that run at the same time; their times are then no measurements."""
    limit_s: float | None = None
    """Seconds for each case; None: 60, or 200 where kernels are checked before their first use."""


def run_cases(
    limits: Mapping[str, float], options: Options, *, module: str = MODULE
) -> list[dict[str, Any]]:
    """The rows of all cases, of which those that the file lacks are run by `module.work`."""
    rows = {row["case"]: row for row in read_lines(options.out)}
    # Without a line that was being written when the program was ended.
    options.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
    lock = threading.Lock()

    def run(name: str) -> None:
        task = {"size": options.size, "case": name}
        limit = options.limit_s or limits[name]
        row = processes.run_worker(module, task, limit_s=limit)
        row = {"case": name, **({"verdict": "failed"} if "failed" in row else {}), **row}
        with lock:
            rows[name] = row
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(line_of(row), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, (name for name in limits if name not in rows)))
    return [rows[name] for name in limits]


def line_of(row: dict[str, Any]) -> str:
    """What a person reads about a case."""
    said = f"{row['case']}: {row['verdict']}"
    if "failed" in row:
        return f"{said}, {row['failed']}"
    if "error" in row:
        said += f", error {row['error']:.2g} of {row['allowed']:.2g} in {row['worst']}"
    if "milliseconds" in row:
        said += f", {row['milliseconds']:.3f} ms"
    ran = {f"{one['implementation']} ({one['reason']})" for one in row.get("implementations", ())}
    return f"{said}, ran {', '.join(sorted(ran))}"


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.first_light.cases import (
        cases,  # Loads jax, which the tests' stand-ins need not.
    )

    options = parse(Options, argv, description=__doc__)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    limits = {name: case.limit_s for name, case in cases(options.size).items()}
    rows = run_cases(limits, options)
    bad = [row["case"] for row in rows if row["verdict"] != "agrees"]
    if bad:
        print(f"{len(bad)} of {len(rows)} cases do not agree: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
