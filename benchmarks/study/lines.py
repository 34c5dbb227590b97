"""Runs named KIND:SEED, each with a line of JSON in a file that later calls continue."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any


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
      make: trains and evaluates one kind and seed, and returns the line.

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
        lines[run] = make(kind, int(seed))
        with out.open("a") as file:
            file.write(json.dumps(lines[run]) + "\n")
    return list(lines.values())
