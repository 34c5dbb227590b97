"""A lock that lets one session at a time write to a run directory, and names that session.

Two mechanisms hold `RUN/lock`, because a run directory may be on a network file system:

- The system's lock (`flock`, which Linux passes on to NFS servers). It ends with the process,
  even if the process is killed. While it is held, another session is refused.
- The content of the file: host, process and the start of both. It is read if the system grants the
  lock although the file exists: the holder was killed, or the file system does not share locks
  between hosts. On the holder's own machine the process table decides. On another machine the
  holder counts as alive if it touches the file within `SILENCE` seconds; it does so every `BEAT`.

Whoever can write to the directory can delete the file under its holder. Then the holder stops: it
looks at every beat, and `check` looks before each write. A run's lock also holds the directory
itself, where the file system can (`flock` of a directory), so that no second session starts.

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

from fwpkm_jax.outside_files import shown
from fwpkm_jax.whole_files import check_local, open_own

NAME = "lock"
"""Of the file, or of the object in a bucket, by which a session holds a run."""
BEAT = 10.0
"""Seconds after which a holder touches the file again."""
SILENCE = 35.0
"""Seconds without a touch after which a holder on another machine counts as dead."""

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)

_LONGEST_RECORD = 4096


class RunInUseError(ValueError):
    """Another session writes to this run directory, or holds the thing that is locked."""


class LostLockError(ValueError):
    """The lock is no longer this session's: its file was removed, replaced or moved away."""


class RunLock:
    """The lock of a run directory, or of a thing in a directory. The constructor takes it;
    `release` gives it back.

    Args:
      directory: the run directory, or another one that exists.
      name: of the lock's file in it.
      thing: what errors call the thing that is locked; "": the directory.
      otherwise: what the user may do instead of waiting.
      say: prints a line, for example that an abandoned lock was taken over.
      whole: also holds the directory itself, as one session at a time may use it.

    Raises:
      RunInUseError: another session holds the lock; the message names its process, host and start.
      ValueError: in place of the lock is a link, or a file that is none.
      OSError: the file cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str = NAME,
        thing: str = "",
        otherwise: str = "choose another --run_dir",
        say: Callable[[str], None] = lambda line: None,
        whole: bool = False,
    ) -> None:
        check_local(directory)
        self.path = directory / name
        self._thing = thing or str(directory)
        self._say = say
        self._directory: int | None = None
        self._file, granted = _open(self.path)
        try:
            if granted and whole:
                self._directory, granted = _hold_directory(directory)
                if not granted and not os.fstat(self._file).st_size:
                    self._remove()  # Made here, because someone removed the holder's.
            self._take(self._thing, otherwise, granted)
        except BaseException:
            self._close()
            raise
        self._lost = False
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._heart.start()

    def _take(self, thing: str, otherwise: str, granted: bool) -> None:
        holder = parse_record(os.pread(self._file, _LONGEST_RECORD, 0))
        if not granted or (holder and self._alive(holder)):
            raise RunInUseError(
                f"{thing} is in use by {holder_name(holder)}; wait until it ends, or {otherwise}."
            )
        if holder is None:
            raise ValueError(
                f"{self.path} is not a lock of this program; move it away and try again."
            )
        if holder:
            self._say(f"Took over {thing} from {holder_name(holder)}, which is gone.")
        record = json.dumps({**_here(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")})
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, record.encode(), 0)
        except OSError as error:
            self._remove()
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _alive(self, holder: dict[str, Any]) -> bool:
        """Whether the process that wrote the file still runs."""
        here = _here()
        if all(holder.get(name) == here[name] for name in ("host", "boot", "namespace")):
            pid = holder.get("pid")
            found = _process_start(pid) if isinstance(pid, int) and 0 < pid < 2**31 else None
            return found is not None and found == holder.get("process_start")
        self._say(
            f"{self.path} belongs to {holder_name(holder)}; waiting up to {SILENCE:.0f} s to "
            "see whether that process still touches it."
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
            self._lost = self._lost or not _is_at(self._file, self.path)

    def check(self) -> None:
        """Call it before each write to what is locked.

        Raises:
          LostLockError: the lock is gone or another session's.
        """
        self._lost = self._lost or not _is_at(self._file, self.path)
        if self._lost:
            raise LostLockError(
                f"Stopped before the next write: {self.path}, by which this session held "
                f"{self._thing}, was removed, replaced or moved. Start it again once no other "
                "session uses it; what was saved is whole."
            )

    def release(self) -> None:
        """Gives the lock back and removes the file, unless another session has put its own."""
        self._released.set()
        self._heart.join()
        self._remove()
        self._close()

    def _remove(self) -> None:
        # Removed before the lock ends: afterwards another session might hold the same file.
        with contextlib.suppress(OSError):
            if _is_at(self._file, self.path):
                self.path.unlink()

    def _close(self) -> None:
        for number in (self._file, self._directory):
            if number is not None:
                os.close(number)


def _open(path: Path) -> tuple[int, bool]:
    """Opens the lock file; returns its descriptor and whether the system grants the lock."""
    while True:
        file = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            granted = _granted(file)
            if not granted or _is_at(file, path):
                return file, granted
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # The holder removed it after it was opened here; try again.


def _hold_directory(directory: Path) -> tuple[int, bool]:
    """Opens a directory; returns its descriptor and whether the system grants its lock."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return number, _granted(number)
    except BaseException:
        os.close(number)
        raise


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
        return os.path.samestat(os.fstat(file), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # Not known, for example while a server does not answer.


def parse_record(content: bytes) -> dict[str, Any] | None:
    """The holder's record; empty if there is no holder, or it did not write it whole.

    None for what no holder wrote.
    """
    content = content[:_LONGEST_RECORD].strip(b"\0 \n")
    try:
        record = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {} if content.startswith(b"{") else None
    return record if isinstance(record, dict) else {}


def _touched(path: Path) -> int | None:
    """When the holder last touched the file, in ns; None if the file does not exist.

    Opening the file makes an NFS client ask the server for the current time stamp.
    """
    try:
        number = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(number).st_mtime_ns
    finally:
        os.close(number)


def holder_name(holder: dict[str, Any] | None) -> str:
    """Process, host and start of a record, for messages."""
    if not holder or "pid" not in holder:
        return "another process"
    pid, host, started = (shown(holder.get(name), 60) for name in ("pid", "host", "started"))
    return f"process {pid} on {host} since {started}"


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
