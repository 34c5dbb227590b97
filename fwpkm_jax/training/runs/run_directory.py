"""A run's directory: its configuration, and a record of the sessions that wrote to it."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from fwpkm_jax.io.atomic import check_local, is_unfinished, write_json
from fwpkm_jax.io.terminal import shell_line
from fwpkm_jax.io.untrusted import read_json

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class DifferentRunError(ValueError):
    """The run directory belongs to a run with another configuration."""


def environment() -> dict[str, Any]:
    """Commit, versions and device of this process, as JSON values."""
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
    """The checked-out commit of this code, with `-dirty` if files changed; None outside git."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        # A package that is installed below another project's checkout is none of its files.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
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
    if directory.is_dir() and any(
        found.name != "lock" and not is_unfinished(found, path) for found in directory.iterdir()
    ):
        raise ValueError(
            f"{directory} is not empty and holds no run (no config.json); choose another --run_dir."
        )
    return None


def make_directory(directory: Path) -> None:
    """Makes the directory of a new run, with its parents.

    Raises:
      ValueError: it cannot be made, or is there and cannot be written to.
    """
    check_local(directory, "run_dir")
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

    Raises:
      DifferentRunError: another field differs. The message lists all such fields and the command
        that started the run.
    """
    changed = [
        line
        for line in differences(dict(old), dict(new))
        if not any(f"{line.split(':')[0]}.".startswith(f"{name}.") for name in may_change)
    ]
    if not changed:
        return
    listing = "\n  ".join(changed)
    hint = ""
    if any(line.startswith("training.memory.groups:") for line in changed):
        hint = " (checkpoint.regroup says how training.memory.groups may change.)"
    command = first_command(directory)
    started = f"It was started with: {command}\n" if command else ""
    raise DifferentRunError(
        f"{directory} holds a run with another configuration:\n  {listing}\n{started}"
        f"Continue it as it was with --resume {directory}, or choose another --run_dir.{hint}"
    )


def first_command(directory: Path) -> str | None:
    """The command that started a run, from `environment.json`; None if it is not recorded there."""
    try:
        sessions = read_json(directory / "environment.json")["sessions"]
        return shell_line(sessions[0]["command"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def record_session(directory: Path, *, fingerprint: str, step: int) -> None:
    """Adds this session to `environment.json`; a resumed run has several sessions."""
    path = directory / "environment.json"
    sessions = read_json(path).get("sessions", []) if path.is_file() else []
    sessions.append({"from_step": step, **environment()})
    write_json(path, {"fingerprint": fingerprint, "sessions": sessions})
