"""Runs one measurement in a process of its own and returns the JSON that it prints.

A process of its own makes the peak memory that of the measurement alone, and a measurement that
hangs or dies costs one row. `python -m benchmarks.processes MODULE JSON` is the other end: it calls
`MODULE.work(task)` and prints the result.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_worker(
    module: str,
    task: Any,
    *,
    variables: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> dict[str, Any]:
    """What `module.work(task)` returns, called in a new process: see `run_json`.

    Args:
      module: full name, `benchmarks.speed.memory`.
      task: JSON.
      variables: environment variables to add.
      limit_s: seconds after which the process is ended.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", __name__, module, json.dumps(task)]
    added = {"PYTHONPATH": paths, **(variables or {})}
    return run_json(command, variables=added, limit_s=limit_s)


def run_json(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> dict[str, Any]:
    """The JSON on the last line that a command prints, or `{"failed": how it ended}`.

    What the command writes to stderr is repeated there when it has ended; a failure ends with the
    last line of it.
    """
    environment = os.environ | dict(variables or {})
    with tempfile.TemporaryFile() as errors:
        try:
            run = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return {"failed": f"{command[0]} does not start: {error.strerror}"}
        try:
            printed, _ = run.communicate(timeout=limit_s)
        except BaseException as error:
            end(run)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return {"failed": f"no result after {limit_s:g} s"}
        errors.seek(0)
        written = errors.read().decode(errors="replace")
    sys.stderr.write(written)
    if run.returncode:
        return {"failed": how_it_ended(run.returncode, written)}
    last = (printed.splitlines() or [""])[-1]
    if not last:
        return {"failed": "printed no result"}
    try:
        return json.loads(last)
    except json.JSONDecodeError:
        return {"failed": f"printed no JSON: {last[:200]}"}


def end(run: subprocess.Popen[Any]) -> None:
    """Ends a process and all that it started; does not wait for one that the driver keeps."""
    for pid in (run.pid, *descendants(run.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.communicate(timeout=10)


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started, in any session."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command's name, in parentheses, may hold blanks; state and parent follow it.
            parent = int(
                stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            )
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, open_ = [], [pid]
    while open_:
        started = children.get(open_.pop(), [])
        found += started
        open_ += started
    return found


def how_it_ended(code: int, written: str) -> str:
    """One line on a process that failed: its signal or exit code, and its last line."""
    ended = f"died by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    return f"{ended}: {lines[-1][:300]}" if lines else ended


if __name__ == "__main__":
    print(json.dumps(importlib.import_module(sys.argv[1]).work(json.loads(sys.argv[2]))))
