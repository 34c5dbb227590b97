"""Seeds each fault into a copy of the working tree and runs tests there; one JSON line per fault.

    python -m lab.seeded_faults --out FILE                  # the tests mapped to each fault
    python -m lab.seeded_faults --out FILE --whole          # then the rest of the suite
    python -m lab.seeded_faults --out FILE --only rules     # an area, or part of a name
    python -m lab.seeded_faults --out FILE --earlier OLD    # first the test that caught it in OLD
    python -m lab.seeded_faults --out FILE --table          # what FILE holds so far

Where the default tests catch nothing, the thorough ones of the same files are run.

A program that is stopped goes on where it was: faults in FILE whose text is the same are passed
over. A test that also fails without the fault catches nothing; such a line says `broken`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.seeded_faults.areas import AREAS
from lab.seeded_faults.fault import Fault, find

_TREE = Path(__file__).parents[2]
_THOROUGH = ("-m", "thorough and not slow")
_ANY = ("-m", "slow or not slow")
_NO_TESTS = 5  # How pytest ends where none is chosen.
_HANGS, _NO_START = "hangs", "does not start"


def main(arguments: list[str] | None = None) -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description="Seeds faults and counts those that tests catch.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--only", default="", help="faults whose area or name contains this")
    parser.add_argument("--whole", action="store_true", help="run the whole suite on the missed")
    parser.add_argument("--again", action="store_true", help="run those again that were missed")
    parser.add_argument("--earlier", type=Path, help="JSON lines of an earlier run")
    parser.add_argument(
        "--table", action="store_true", help="print what the file holds, run nothing"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per run of pytest")
    options = parser.parse_args(arguments)
    known = read_results(options.out)
    earlier = read_results(options.earlier) if options.earlier else {}
    if not options.table:
        with tempfile.TemporaryDirectory() as folder:
            tree = copy_tree(Path(folder))
            for area, fault in chosen(options.only):
                before = known.get(fault.name)
                if before and not (before["caught"] is False and (options.again or options.whole)):
                    continue
                caught_by = earlier.get(fault.name, {}).get("by")
                result = {"area": area, **try_fault(fault, tree, options, caught_by)}
                known[fault.name] = result
                with options.out.open("a") as out:
                    print(json.dumps(result), file=out)
                print(f"{area}: {fault.name}: {verdict(result)}", flush=True)
    print(summary(known))


def chosen(part: str) -> Iterator[tuple[str, Fault]]:
    """The faults whose area or name contains `part`."""
    for area, faults in AREAS.items():
        for fault in faults:
            if part in area or part in fault.name:
                yield area, fault


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each fault that is still listed with the same text."""
    texts = {fault.name: [fault.before, fault.after] for _, fault in chosen("")}
    lines = path.read_text().splitlines() if path.exists() else []
    results = {result["fault"]: result for result in map(json.loads, lines)}
    return {name: x for name, x in results.items() if texts.get(name) == [x["before"], x["after"]]}


def copy_tree(folder: Path) -> Path:
    """A copy of the files that git knows of, with `shared` beside it where the tree has one."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=_TREE, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    tree = folder / "tree"
    for name in filter(None, names):
        source, target = _TREE / name, tree / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    if (shared := _TREE.parent / "shared").is_dir():
        (folder / "shared").symlink_to(shared)
    return tree


def try_fault(
    fault: Fault, tree: Path, options: argparse.Namespace, caught_by: str | None = None
) -> dict[str, Any]:
    """Seeds the fault, runs the tests mapped to it and perhaps the others, and takes it out.

    The test `caught_by`, which caught it in an earlier run, comes first where there is such a file.
    """
    path = find(fault, tree)
    source = path.read_text()
    line = source[: source.index(fault.before)].count("\n") + 1
    began = time.monotonic()
    write_at_new_time(path, source.replace(fault.before, fault.after))
    try:
        by = None
        if caught_by and (tree / caught_by.split("::")[0]).is_file():
            by = first_failure(tree, [caught_by, *_ANY], options.timeout)
        if by in (None, _NO_START):  # A test of another name, perhaps.
            by = first_failure(tree, [*fault.tests], options.timeout)
        if by is None and "-m" not in fault.tests:
            by = first_failure(tree, [*fault.tests, *_THOROUGH], options.timeout)
        if by is None and options.whole:
            by = first_failure(tree, ["-n", "auto"], options.timeout)
    finally:
        write_at_new_time(path, source)
    seconds = round(time.monotonic() - began, 1)
    broken = False
    if by is not None and by not in (_HANGS, _NO_START):
        # Whatever its marks are: a default run would pass over a thorough test.
        again = first_failure(tree, [by, *_ANY], options.timeout)
        broken = again is not None
    return {
        "fault": fault.name,
        "file": f"{path.relative_to(tree)}:{line}",
        "before": fault.before,
        "after": fault.after,
        "caught": by is not None and not broken,
        "broken": broken,
        "by": by,
        "tests": [*fault.tests],
        "whole": options.whole,
        "seconds": seconds,
    }


def write_at_new_time(path: Path, text: str) -> None:
    """Writes `text` with a time that no version before had: bytecode is told apart by seconds."""
    later = path.stat().st_mtime + 2
    path.write_text(text)
    os.utime(path, (later, later))


def first_failure(tree: Path, arguments: list[str], timeout: float) -> str | None:
    """The first test that fails, `hangs` or `does not start`; None where all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-rfE", *arguments]
    if "-n" not in arguments:
        command += ["-n", "0"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return _HANGS
    if done.returncode in (0, _NO_TESTS):
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" ", 1)[1].split(" - ")[0] if failed else _NO_START


def verdict(result: dict[str, Any]) -> str:
    """One fault's result in words."""
    if result["broken"]:
        return f"broken: {result['by']} fails without the fault too"
    return f"caught by {result['by']}" if result["caught"] else "MISSED"


def summary(results: dict[str, dict[str, Any]]) -> str:
    """A Markdown table by area, then the faults that were missed."""
    rows = ["| area | faults | tried | caught |", "|---|---|---|---|"]
    for area, faults in AREAS.items():
        tried = [results[fault.name] for fault in faults if fault.name in results]
        caught = sum(result["caught"] for result in tried)
        rows.append(f"| {area} | {len(faults)} | {len(tried)} | {caught} |")
    caught, listed = sum(x["caught"] for x in results.values()), sum(map(len, AREAS.values()))
    rows.append(f"| all | {listed} | {len(results)} | {caught} |")
    missed = [
        f"- {x['area']}: {name} ({x['file']})" for name, x in results.items() if not x["caught"]
    ]
    return "\n".join([*rows, "", *(["Missed:", *missed] if missed else ["None was missed."])])


if __name__ == "__main__":
    main()
