"""A lock that lets one session at a time write to a run directory, and names that session.

Two mechanisms hold `RUN/lock`, because a run directory may be on a network file system:

- The system's lock (`flock`, which Linux passes on to NFS servers). It ends with the process,
  even if the process is killed. While it is held, another session is refused.
- The content of the file: host, process and the start of both. It is read if the system grants the
  lock although the file exists: the holder was killed, or the file system does not share locks
  between hosts. On the holder's own machine the process table decides. On another machine the
  holder counts as alive if it touches the file within `SILENCE` seconds; it does so every `BEAT`.

If several processes train one run together, the first process holds the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEAT = 10.0
"""Seconds after which a holder touches the file again."""
SILENCE = 35.0
"""Seconds without a touch after which a holder on another machine counts as dead."""

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunInUseError(ValueError):
    """Another session writes to this run directory, or holds the thing that is locked."""


class RunLock:
    """The lock of a run directory, or of a thing in a directory. The constructor takes it;
    `release` gives it back.

    Args:
      directory: the run directory, or another one that exists.
      name: of the lock's file in it.
      thing: what errors call the thing that is locked; "": the directory.
      otherwise: what the user may do instead of waiting.
      say: prints a line, for example that an abandoned lock was taken over.

    Raises:
      RunInUseError: another session holds the lock; the message names its process, host and start.
      OSError: the file cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "lock",
        thing: str = "",
        otherwise: str = "choose another --run_dir",
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.path = directory / name
        self._say = say
        self._file, granted = _open(self.path)
        try:
            self._take(thing or str(directory), otherwise, granted)
        except BaseException:
            os.close(self._file)
            raise
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._heart.start()

    def _take(self, thing: str, otherwise: str, granted: bool) -> None:
        holder = _read(self._file)
        if not granted or (holder and self._alive(holder)):
            raise RunInUseError(
                f"{thing} is in use by {_name(holder)}; wait until it ends, or {otherwise}."
            )
        if holder:
            self._say(f"Took over {thing} from {_name(holder)}, which is gone.")
        record = json.dumps({**_here(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")})
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, record.encode(), 0)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _alive(self, holder: dict[str, Any]) -> bool:
        """Whether the process that wrote the file still runs."""
        here = _here()
        if all(holder.get(name) == here[name] for name in ("host", "boot", "namespace")):
            return _process_start(holder.get("pid", 0)) == holder.get("process_start")
        self._say(
            f"{self.path} belongs to {_name(holder)}; waiting up to {SILENCE:.0f} s to see whether "
            "that process still touches it."
        )
        first, deadline = _touched(self.path), time.monotonic() + SILENCE
        while time.monotonic() < deadline:
            time.sleep(min(1.0, SILENCE / 10))
            if _touched(self.path) != first:
                return True
        return False

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def release(self) -> None:
        """Gives the lock back and removes the file."""
        self._released.set()
        self._heart.join()
        # Removed before the lock ends: afterwards another session might hold the same file.
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._file)


def _open(path: Path) -> tuple[int, bool]:
    """Opens the lock file; returns its descriptor and whether the system grants the lock."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            granted = _granted(file)
            if not granted or _is_at(file, path):
                return file, granted
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # The holder removed it after it was opened here; try again.


def _granted(file: int) -> bool:
    """Whether the system grants this process the lock; also True if it does not support locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _read(file: int) -> dict[str, Any]:
    """The holder's record; empty if there is no holder, or it has not written yet."""
    try:
        record = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _touched(path: Path) -> int | None:
    """When the holder last touched the file, in ns; None if the file does not exist.

    Opening the file makes an NFS client ask the server for the current time stamp.
    """
    try:
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _name(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('started')}"


def _here() -> dict[str, Any]:
    """This process, and where its id is valid: host, boot, process namespace."""
    pid = os.getpid()
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    return {
        "pid": pid,
        "host": socket.gethostname(),
        "process_start": _process_start(pid),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "namespace": os.readlink(namespace) if namespace.is_symlink() else "",
    }


def _process_start(pid: int) -> str | None:
    """When a process started, in the system's clock ticks; None if it does not run.

    "" if it runs but its start is unknown, on systems without /proc.
    """
    try:
        # The name in brackets may hold spaces; the start is field 22, the state field 3.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:  # A system without /proc.
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
