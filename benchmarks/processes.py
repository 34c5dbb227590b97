"""Runs one measurement in a process of its own and returns the JSON that it prints.

A process of its own makes the peak memory that of the measurement alone, and a measurement that
hangs or dies costs one row. `python -m benchmarks.processes MODULE JSON` is the other end: it calls
`MODULE.work(task)` and prints the result. With `--talk` it prints what `MODULE.talk(task)` yields,
and waits before each further line until it is told to go on; `Conversation` is this end.
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
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


class Conversation:
    """A measurement in a new process that stops at each line of JSON until it is told to go on.

    So several processes compile side by side, and then measure one after the other. Lines that are
    no JSON object are printed on stderr.
    """

    def __init__(self, command: Sequence[str], *, variables: Mapping[str, str] | None = None):
        """Starts the command; a failure to start is what `hear` returns."""
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`.
        self._failed: str | None = None
        try:
            self._run: subprocess.Popen[str] | None = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=os.environ | dict(variables or {}),
                start_new_session=True,
            )
        except OSError as error:
            self._run = None
            self._failed = f"{command[0]} does not start: {error.strerror}"
            return
        self._reader = threading.Thread(target=self._read, args=(self._run.stdout,), daemon=True)
        self._reader.start()

    @classmethod
    def of(
        cls, module: str, task: Any, *, variables: Mapping[str, str] | None = None
    ) -> "Conversation":
        """The conversation with `module.talk(task)`, a generator of JSON objects."""
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", __name__, "--talk", module, json.dumps(task)]
        return cls(command, variables={"PYTHONPATH": paths, **(variables or {})})

    def hear(self, limit_s: float) -> dict[str, Any]:
        """The next line, or `{"failed": reason}` if the process ended or took too long."""
        if self._run is None:
            return {"failed": self._failed}
        stop = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, stop - time.monotonic()))
            except queue.Empty:
                self.end()
                return {"failed": f"no result after {limit_s:g} s"}
            if line is None:
                return {"failed": self._how_it_ended()}
            with contextlib.suppress(json.JSONDecodeError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
            sys.stderr.write(line)

    def tell(self) -> None:
        """Lets the process go on."""
        if self._run is not None and self._run.stdin is not None:
            with contextlib.suppress(OSError):  # It has ended; `hear` says how.
                self._run.stdin.write("\n")
                self._run.stdin.flush()

    def end(self) -> None:
        """Ends the process and all that it started."""
        if self._run is not None:
            kill(self._run)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._run.wait(timeout=10)
            self._reader.join(timeout=10)
            if self._run.stdin is not None:
                with contextlib.suppress(OSError):  # What it had not read yet.
                    self._run.stdin.close()
        self._errors.close()

    def _read(self, stdout: Any) -> None:
        with stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _how_it_ended(self) -> str:
        assert self._run is not None
        try:
            code = self._run.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.end()
            return "closed its output and did not end"
        self._errors.seek(0)
        written = self._errors.read().decode(errors="replace")
        sys.stderr.write(written)
        return how_it_ended(code, written) if code else "ended without a result"


def end(run: subprocess.Popen[Any]) -> None:
    """Ends a process and all that it started; does not wait for one that the driver keeps."""
    kill(run)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.communicate(timeout=10)


def kill(run: subprocess.Popen[Any]) -> None:
    """Sends SIGKILL to a process and to all that it started."""
    for pid in (run.pid, *descendants(run.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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


def _talk(module: str, task: str) -> None:
    for line in importlib.import_module(module).talk(json.loads(task)):
        print(json.dumps(line), flush=True)
        if not sys.stdin.readline():  # The other end has gone.
            return


if __name__ == "__main__":
    if sys.argv[1] == "--talk":
        _talk(*sys.argv[2:])
    else:
        print(json.dumps(importlib.import_module(sys.argv[1]).work(json.loads(sys.argv[2]))))
