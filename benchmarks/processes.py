"""Runs one measurement in a process of its own and returns the JSON that it prints.

A process of its own makes the peak memory that of the measurement alone, and a measurement that
hangs or dies costs one row. `python -m benchmarks.processes MODULE JSON` is the other end: it calls
`MODULE.work(task)` and prints the result.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
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
    """The JSON on the last line that a command prints, or `{"failed": how it ended}`."""
    environment = os.environ | dict(variables or {})
    try:
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
    except OSError as error:
        return {"failed": f"{command[0]} does not start: {error.strerror}"}
    try:
        printed, _ = run.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return {"failed": f"no result after {limit_s:.0f} s"}
    if run.returncode:
        return {"failed": f"exit code {run.returncode}"}
    last = (printed.splitlines() or [""])[-1]
    if not last:
        return {"failed": "printed no result"}
    try:
        return json.loads(last)
    except json.JSONDecodeError:
        return {"failed": f"printed no JSON: {last[:200]}"}


if __name__ == "__main__":
    print(json.dumps(importlib.import_module(sys.argv[1]).work(json.loads(sys.argv[2]))))
