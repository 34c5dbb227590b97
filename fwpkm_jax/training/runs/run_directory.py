"""A run's directory: configuration, environment, one metrics record per step, results."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.summary import scalar

from fwpkm_jax.whole_files import read_json, unfinished, write_json

logger = logging.getLogger(__name__)

# Messages that protobuf makes at import, unseen by type checkers.
Event: Any = vars(event_pb2)["Event"]
SessionLog: Any = vars(event_pb2)["SessionLog"]
Summary: Any = vars(summary_pb2)["Summary"]

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class DifferentRunError(ValueError):
    """The run directory belongs to a run with another configuration."""


def environment() -> dict[str, Any]:
    """Commit, versions and device of this process: what else determines a run's numbers."""
    device = jax.devices()[0]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "backend": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "command": sys.argv,
    }


def git_commit() -> str | None:
    """The checked-out commit of this code, `-dirty` if files differ from it; None outside git."""
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None  # An installed package, or no git on this machine.
    return commit + ("-dirty" if changed else "")


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The fields in which two configurations as JSON differ, as `section.field: OLD -> NEW`."""
    if isinstance(old, dict) and isinstance(new, dict) and old.get("class") == new.get("class"):
        found = []
        for name in [*new, *(n for n in old if n not in new)]:
            found += differences(old.get(name), new.get(name), f"{path}.{name}" if path else name)
        return found
    if old == new:
        return []
    short = [x["class"] if isinstance(x, dict) and "class" in x else x for x in (old, new)]
    return [f"{path}: {short[0]!r} -> {short[1]!r}"]


def find_config(directory: Path) -> dict[str, Any] | None:
    """The configuration of the run in a directory, as JSON; None if a new run can start there.

    Raises:
      ValueError: the directory is a file, or holds something that is not a run.
    """
    path = directory / "config.json"
    if path.is_file():
        copy = "each checkpoint has a copy of it, checkpoints/STEP/config/metadata"
        return read_json(path, otherwise=copy)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, not a directory; choose another --run_dir.")
    if directory.is_dir() and set(directory.iterdir()) - {unfinished(path), directory / "lock"}:
        raise ValueError(
            f"{directory} is not empty and holds no run (no config.json); choose another --run_dir."
        )
    return None


def make_directory(directory: Path) -> None:
    """Makes the directory of a new run, with its parents.

    Raises:
      ValueError: it cannot be made, or is there and cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"The run directory {directory} cannot be made ({error.strerror}); choose a --run_dir "
            "that you may write to."
        ) from error
    if not os.access(directory, os.W_OK):
        raise ValueError(
            f"The run directory {directory} cannot be written to; choose another --run_dir."
        )


def refuse_changes(
    directory: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, may_change: Sequence[str]
) -> None:
    """Compares the configuration of the run in a directory with the one to continue it with.

    Args:
      directory: the run directory.
      old: the run's configuration as JSON.
      new: the experiment as JSON.
      may_change: fields, or sections, that may differ.

    Raises:
      DifferentRunError: another field differs. Lists all of them, and the run's own command.
    """
    changed = [
        line
        for line in differences(dict(old), dict(new))
        if not any(_within(line.split(":")[0], name) for name in may_change)
    ]
    if not changed:
        return
    listing = "\n  ".join(changed)
    hint = ""
    if any(line.startswith("training.memory.groups:") for line in changed):
        hint = " (checkpoint.regroup says how memory.groups may change.)"
    command = first_command(directory)
    started = f"It was started with: {command}\n" if command else ""
    raise DifferentRunError(
        f"{directory} holds a run with another configuration:\n  {listing}\n{started}"
        f"Continue it as it was with --resume {directory}, or choose another --run_dir.{hint}"
    )


def first_command(directory: Path) -> str | None:
    """The command that started a run, as `environment.json` tells; None if it does not."""
    try:
        sessions = read_json(directory / "environment.json")["sessions"]
        return shlex.join(sessions[0]["command"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def claim(directory: Path, config: Mapping[str, Any], *, may_change: Sequence[str] = ()) -> None:
    """Makes a new run's directory and `config.json`, or checks that the run there is this one.

    Raises:
      DifferentRunError: the directory holds a run with another configuration.
      ValueError: it holds something that is not a run, or cannot be made.
    """
    old = find_config(directory)
    if old is not None:
        refuse_changes(directory, old, config, may_change=may_change)
        return
    make_directory(directory)
    write_json(directory / "config.json", dict(config))


def _within(name: str, section: str) -> bool:
    return name == section or name.startswith(section + ".")


def record_session(directory: Path, *, fingerprint: str, step: int) -> None:
    """Adds this process to `environment.json`; a run that was resumed has several sessions."""
    path = directory / "environment.json"
    sessions = read_json(path).get("sessions", []) if path.is_file() else []
    sessions.append({"from_step": step, **environment()})
    write_json(path, {"fingerprint": fingerprint, "sessions": sessions})


def truncate_metrics(path: Path, *, step: int) -> None:
    """Drops records past `step`, and lines that are no records: cut off, or damaged since.

    The steps after the checkpoint are trained again, so their records come again.
    """
    if not path.is_file():
        return
    temporary = unfinished(path)
    with path.open("rb") as old, temporary.open("wb") as new:
        for number, line in enumerate(old, start=1):
            record_step = _record_step(line)
            if record_step is None:
                logger.warning("Leaving out line %d of %s, which is no record.", number, path)
            elif record_step <= step:
                new.write(line.rstrip(b"\n") + b"\n")
    os.replace(temporary, path)


def _record_step(line: bytes) -> int | None:
    """The step of a line of `metrics.jsonl`, None if it is no record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


class MetricsWriter:
    """`metrics.jsonl`, one object per step, and TensorBoard events; close it in the end."""

    def __init__(self, directory: Path, *, step: int, tensorboard_every: int) -> None:
        """Opens both behind `step`, the step the run starts from."""
        truncate_metrics(directory / "metrics.jsonl", step=step)
        self._file = (directory / "metrics.jsonl").open("a")
        (directory / "tensorboard").mkdir(exist_ok=True)
        # Not tensorboardX's SummaryWriter: its thread dies where a disk is full, and then who
        # writes to it waits for ever.
        self._events = EventsWriter(str(directory / "tensorboard" / "events"))
        start = SessionLog(status=SessionLog.START)  # Of an earlier session, events from here on
        self._add(Event(step=step + 1, session_log=start))  # are not shown.
        self._every = tensorboard_every

    def close(self) -> None:
        """Closes both."""
        self._file.close()
        self._events.close()

    def write(self, step: int, values: Mapping[str, float], *, event: bool = False) -> None:
        """Appends one step's record.

        Args:
          step: the step that the values belong to; each step once, in order.
          values: by name. A value that is not finite becomes null: JSON has no NaN.
          event: write TensorBoard events whether or not it is this step's turn.
        """
        record = {n: float(v) if np.isfinite(v) else None for n, v in values.items()}
        self._file.write(json.dumps({"step": step, **record}, allow_nan=False) + "\n")
        # A killed process keeps what it handed to the system.
        self._file.flush()
        if event or step % self._every == 0:
            summary = Summary(value=[scalar(n, v).value[0] for n, v in values.items()])
            self._add(Event(step=step, summary=summary))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)
