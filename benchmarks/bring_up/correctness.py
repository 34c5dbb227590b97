"""Compares every kernel with its reference, each case in a process of its own.

    python -m benchmarks.bring_up.correctness --out cases.jsonl

A case that hangs, dies or gives wrong numbers costs its own process: one line says so, and the
others run. The file gets one line of JSON for each case, as soon as it has ended. A case whose line
is in the file, of the same source and kind of device, is not run again.

`--verdicts` names a file that takes the verdicts of kernels' checks before first use to another
machine: those in it are put where `pallas_kernels.verdicts` looks, and all are written back.
"""

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import processes
from benchmarks.bring_up import sources
from benchmarks.bring_up.files import read_lines
from benchmarks.options import parse

MODULE = "benchmarks.bring_up.cases"


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
    """Seconds for each case; None: as the case says."""
    seconds: float = 3600
    """No case runs longer than until so many seconds after the start."""
    device: str | None = None
    """Kind of this machine's device: lines of another one are made again; None: any counts."""
    verdicts: Path | None = None
    """File with verdicts to take over, and for those found; None: they stay on this machine."""


def run_cases(
    limits: Mapping[str, float],
    options: Options,
    *,
    module: str = MODULE,
    folders: Mapping[str, Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """The rows of all cases, of which those that the file lacks are run by `module.work`.

    Args:
      limits: seconds of each case, in the order in which they start.
      options: the program's.
      module: where `work` is.
      folders: of the kernels that each case compares; None: each line of the file counts.
    """
    source = {name: sources.of_case((folders or {}).get(name, ())) for name in limits}
    rows = {
        row["case"]: row
        for row in read_lines(options.out)
        if folders is None or sources.is_measured(row, source.get(row["case"], ""), options.device)
    }
    # Without a line that was being written when the program was ended.
    options.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
    lock, stop = threading.Lock(), time.monotonic() + options.seconds

    def run(name: str) -> None:
        task = {"size": options.size, "case": name}
        left = stop - time.monotonic()
        if left <= 0:
            print(f"{name}: not started, {options.seconds:g} s are over", flush=True)
            return
        limit = min(options.limit_s or limits[name], left)
        row = processes.run_worker(module, task, limit_s=limit)
        row = {"case": name, **({"verdict": "failed"} if "failed" in row else {}), **row}
        row["source"] = source[name]
        with lock:
            rows[name] = row
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(line_of(row), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, (name for name in limits if name not in rows)))
    return [rows[name] for name in limits if name in rows]


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
    # Load jax, which the tests' stand-ins need not.
    from benchmarks import carried_verdicts
    from benchmarks.bring_up.cases import cases

    options = parse(Options, argv, description=__doc__)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = cases(options.size)
    # Kernels that agreed and did not change since then are skipped; the order is for the others.
    first = sorted(found, key=lambda name: found[name].place)
    limits = {name: found[name].limit_s for name in first}
    if options.verdicts is not None:
        carried_verdicts.take(options.verdicts)
    try:
        rows = run_cases(
            limits, options, folders={name: case.folders for name, case in found.items()}
        )
    finally:
        if options.verdicts is not None:
            carried_verdicts.give(options.verdicts)
    bad = [row["case"] for row in rows if row["verdict"] != "agrees"]
    if bad:
        print(f"{len(bad)} of {len(rows)} cases do not agree: {', '.join(bad)}", file=sys.stderr)
    elif len(rows) < len(limits):
        print(f"{len(limits) - len(rows)} cases were not started.", file=sys.stderr)
    return 1 if bad or len(rows) < len(limits) else 0


if __name__ == "__main__":
    sys.exit(main())
