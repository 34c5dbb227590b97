"""The verdict on a kernel: whether it agrees with its reference on this machine's device.

A kernel that waits for ever would stop the program. After a kernel reads a wrong address, its
process cannot use the GPU any more. Therefore `pallas_kernels.check_here` checks a GPU's kernels in
a separate process with a time limit. A TPU belongs to one process at a time, so its kernels are
checked in the program itself.

Verdicts are kept in `$XDG_CACHE_HOME/fwpkm_jax/kernel_checks` (`~/.cache` by default), one file for
each check, kernel, kind of device, version of jax and jaxlib, and content of this package. A later
start reads the file instead of running the check.
"""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax

LIMIT_S = 600.0
"""Seconds after which a check in a separate process is ended. The longest one, that of the rows,
took 134 s beside seven other processes on an H200's host of 16 cores."""
_PROGRAM = "pallas_kernels.check_here"


class Verdict(NamedTuple):
    """The result of a check.

    Attributes:
      failure: None if the kernel agrees with the reference, else what went wrong.
      lasting: whether the same check would give the same result again; False if the device had no
        memory left or the process could not use it. Only lasting verdicts are kept.
    """

    failure: str | None
    lasting: bool = True


def verdict(
    check: str | Callable[..., None], kernel: str, device_kind: str, run: Callable[[], Verdict]
) -> Verdict:
    """The verdict that an earlier process stored, or the verdict of `run()`, which is then stored.

    A check that has no name, such as a function inside a test, always runs.
    """
    if not isinstance(check, str):
        return run()
    file = folder() / f"{_key(check, kernel, device_kind)}.json"
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return Verdict(kept["failure"])
    except (OSError, ValueError, KeyError, TypeError):
        found = run()
    if found.lasting:
        _keep(file, {"check": check, "kernel": kernel, "device": device_kind}, found)
    return found


def run_apart(check: str, kernel: str, device_kind: str, *, limit_s: float = LIMIT_S) -> Verdict:
    """Runs a check, `MODULE:NAME`, in a separate process and ends it after `limit_s`."""
    # -P: not from the current folder, whose files may be a stranger's.
    command = [*(sys.executable, "-P", "-m", _PROGRAM), check, kernel, device_kind]
    variables = {
        # The child finds the same modules as this process.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        # This process already holds most of the device's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if jax.default_backend() != "cpu":
        variables["JAX_PLATFORMS"] = "cuda"
    return _answer(command, variables, limit_s)


def _answer(command: Sequence[str], variables: Mapping[str, str], limit_s: float) -> Verdict:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict(variables),
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # A driver may block its end.
            process.communicate(timeout=10)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Verdict(f"no answer after {limit_s:g} s")
    if process.returncode < 0:
        return Verdict(f"its process died by {signal.Signals(-process.returncode).name}")
    try:
        answer = json.loads((printed.splitlines() or [""])[-1])
        return Verdict(answer["failure"], answer["lasting"])
    except (ValueError, KeyError, TypeError):
        last = (errors.strip().splitlines() or ["it printed no error"])[-1]
        failure = f"its process ended with exit code {process.returncode}: {last}"
        return Verdict(failure, lasting=False)


def folder() -> Path:
    """Where this machine's verdicts are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "fwpkm_jax", "kernel_checks")


def _key(check: str, kernel: str, device_kind: str) -> str:
    facts = (check, kernel, device_kind, jax.__version__, version("jaxlib"), _content())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


@functools.cache
def _content() -> str:
    """A hash of this package's source."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _keep(file: Path, facts: dict[str, str], found: Verdict) -> None:
    """Writes the file atomically. If it cannot be written, the next start runs the check again."""
    partial = file.with_suffix(f".{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("x", encoding="utf-8") as new:
            json.dump({**facts, "failure": found.failure}, new)
        partial.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
