"""A lock that lets one session at a time write, on a disk or in a bucket, and names that session.

The holder writes a record: process, host and the start of both. Another session that finds a
record is refused, unless the holder is gone. Where the holder ran on the same machine, the process
table tells. Otherwise the holder counts as gone when it gave no sign of life for `SILENCE` seconds;
it gives one every `BEAT`. What is no record of this program is left as it is.

The record is kept in one of two ways:

- A file, `RUN/lock`. The system's lock of it (`flock`, which Linux passes on to NFS servers) ends
  with the process, even if the process is killed; while it is held, no record is looked at. A sign
  of life is a new time stamp. A run's lock also holds the directory itself, so that no second
  session starts where the file was removed.
- An object in a bucket. It is made by a write that holds only if there is none, and written again,
  as a sign of life, by one that holds only if it is still the holder's. It is taken over by such a
  write too: of two that try at once, one wins.

A holder that was suspended, or whose lock was removed, stops: `check` looks before each write. If
several processes train one run together, the first process holds the lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from fwpkm_jax.io.atomic import check_local, open_own
from fwpkm_jax.io.untrusted import OutsideFileError, shown
from fwpkm_jax.storage.addresses import StoreError
from fwpkm_jax.storage.repeated import Repeated
from fwpkm_jax.storage.stores import Store

Taken = TypeVar("Taken")
NAME = "lock"
"""Of the file or object by which a session holds a run."""
BEAT = 10.0
"""Seconds between two signs of life."""
SILENCE = 35.0
"""Seconds without a sign of life after which a holder on another machine counts as gone."""

LONGEST_WAIT = 60.0
"""Seconds for which `patiently` waits."""

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)

_LONGEST_RECORD = 4096
_BEGINNING = b'{"pid": '


class RunInUseError(ValueError):
    """Another session writes to this run directory, or holds the thing that is locked."""


class LostLockError(ValueError):
    """The lock is no longer this session's: it was removed, replaced or moved away."""


class Lock:
    """The lock of a run, or of a thing in a folder. The constructor takes it; `release` gives it
    back.

    Args:
      folder: the run's directory, or another one that exists; or one in a bucket.
      name: of the lock's file or object in it.
      thing: what errors call the thing that is locked; "": the folder.
      otherwise: what the user may do instead of waiting.
      say: prints a line, for example that an abandoned lock was taken over.
      whole: also holds the directory itself, as one session at a time may use it.

    Raises:
      RunInUseError: another session holds the lock; the message names its process, host and start.
      ValueError: in place of the lock is a link or something that this program did not write; or
        the store ignores the conditions of writes, so that it can hold no lock.
      OSError: the file cannot be written, or the store cannot be asked.
    """

    def __init__(
        self,
        folder: Path | Store,
        *,
        name: str = NAME,
        thing: str = "",
        otherwise: str = "choose another --run_dir",
        say: Callable[[str], None] = lambda line: None,
        whole: bool = False,
    ) -> None:
        self._thing, self._otherwise, self._say = thing or str(folder), otherwise, say
        if isinstance(folder, Store):
            self._place: "_File | _Object" = _Object(folder, name)
        else:
            self._place = _File(folder, name, whole=whole)
        self._asking = threading.Lock()
        self._alive_at = _now()
        self._lost = False
        try:
            self._take()
        except BaseException:
            self._place.close()
            raise
        self._heart = Repeated(self._beat, BEAT, name="lock")

    def _take(self) -> None:
        place = self._place
        found = place.look()
        holder = parse_record(found[0]) if found else {}
        if not place.granted:
            raise self._in_use(holder)
        # A file may be empty, or hold a part of a record.
        if holder is None or (found and not holder and not place.on_disk):
            raise ValueError(
                f"{place.where} is not a lock of this program; move it away and try again."
            )
        if found and holder:
            found = self._wait_for_silence(found, holder)
        # Whoever takes over waited since the last sign of life, which was before this.
        self._alive_at = _now()
        if not place.write(found):
            now = place.look()
            raise self._in_use(parse_record(now[0]) if now else None)
        if found and holder:
            self._say(f"Took over {self._thing} from {holder_name(holder)}, which is gone.")

    def _wait_for_silence(self, found: "_Found", holder: dict[str, Any]) -> "_Found | None":
        """What is there once its holder is gone; None if it has given the lock back meanwhile."""
        runs = _runs(holder)
        if runs is False:
            return found
        if runs and self._place.on_disk:
            raise self._in_use(holder)
        self._say(
            f"{self._place.where} belongs to {holder_name(holder)}; waiting up to {SILENCE:.0f} s "
            "to see whether that process still gives a sign of life."
        )
        deadline = _now() + SILENCE
        while _now() < deadline:
            time.sleep(min(1.0, SILENCE / 10))
            now = self._place.look()
            if now is None:
                return None
            if now[1] != found[1]:
                raise self._in_use(parse_record(now[0]))
        return found

    def _in_use(self, holder: dict[str, Any] | None) -> RunInUseError:
        return RunInUseError(
            f"{self._thing} is in use by {holder_name(holder)}; wait until it ends, or "
            f"{self._otherwise}."
        )

    def _beat(self) -> None:
        with self._asking, contextlib.suppress(StoreError):  # `check` knows for how long.
            now = _now()
            if self._place.beat():
                self._alive_at = now
            else:
                self._lost = True

    def check(self, *, ask: bool = True) -> None:
        """Call it before each write to what is locked.

        A store that does not answer is no reason to stop before `SILENCE` seconds are over: until
        then no other session takes the lock.

        Args:
          ask: whether a store is asked; else only what the last sign of life told counts.

        Raises:
          LostLockError: the lock is gone or another session's, or could not be looked at for so
            long that another session may have it.
        """
        with self._asking:
            try:
                if ask or self._place.on_disk:
                    self._lost = self._lost or not self._place.is_ours()
            except StoreError:
                self._lost = self._lost or _now() - self._alive_at > SILENCE
        if self._lost:
            raise LostLockError(
                f"Stopped before the next write: {self._place.where}, by which this session held "
                f"{self._thing}, was removed, replaced or moved. Start it again once no other "
                "session uses it; what was saved is whole."
            )

    def release(self) -> None:
        """Gives the lock back and removes it, unless another session has put its own."""
        self._heart.end()
        with contextlib.suppress(OSError):  # Others see that its process ended or is silent.
            self._place.remove()
        self._place.close()


def patiently(take: Callable[[], Taken]) -> Taken:
    """What `take` gives, which is tried again for a minute while another session has the lock."""
    deadline = time.monotonic() + LONGEST_WAIT
    while True:
        try:
            return take()
        except RunInUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


_Found = tuple[bytes, object]
"""A record, and what changes with each sign of life."""


class _File:
    """A lock's record in a file, which the system locks, too, where it can."""

    on_disk = True

    def __init__(self, folder: Path, name: str, *, whole: bool) -> None:
        check_local(folder)
        self.where = folder / name
        self._folder: int | None = None
        # Whether the system lets this process have the lock.
        self._file, self.granted = _open(self.where)
        try:
            if self.granted and whole:
                self._folder, self.granted = _hold_directory(folder)
                if not self.granted and not os.fstat(self._file).st_size:
                    self.remove()  # Made here, because someone removed the holder's.
        except BaseException:
            self.close()
            raise

    def look(self) -> _Found:
        return os.pread(self._file, _LONGEST_RECORD, 0), _touched(self.where)

    def write(self, found: _Found | None) -> bool:
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(_record()).encode(), 0)
        except OSError as error:
            self.remove()
            raise OSError(error.errno, error.strerror, str(self.where)) from error
        return True

    def beat(self) -> bool:
        with contextlib.suppress(OSError):
            os.utime(self._file)
        return self.is_ours()

    def is_ours(self) -> bool:
        return _is_at(self._file, self.where)

    def remove(self) -> None:
        # Removed before the lock ends: afterwards another session might hold the same file.
        with contextlib.suppress(OSError):
            if self.is_ours():
                self.where.unlink()

    def close(self) -> None:
        for number in (self._file, self._folder):
            if number is not None:
                os.close(number)


class _Object:
    """A lock's record in an object of a bucket."""

    on_disk = False
    granted = True

    def __init__(self, store: Store, name: str) -> None:
        self.where = f"{store}/{name}"
        self._name, self._patient = name, store
        self._store = Store(store.address, tries=1)  # `Lock` knows how long it may wait.
        self._token, self._beats = secrets.token_hex(8), 0
        self._record = {**_record(), "token": self._token}

    def look(self) -> _Found | None:
        return self._look(self._patient)

    def _look(self, store: Store) -> _Found | None:
        try:
            return store.versioned(self._name)
        except OutsideFileError:  # Too large for a record.
            return b"", ""

    def _next(self) -> bytes:
        self._beats += 1
        return json.dumps({**self._record, "beat": self._beats}).encode()

    def write(self, found: _Found | None) -> bool:
        if found is None:
            taken = self._patient.create(self._name, self._next())
        else:
            taken = self._patient.replace(self._name, self._next(), str(found[1]))
        if taken and self._patient.create(self._name, self._next()):
            raise ValueError(
                f"{self._patient} writes an object although there is one and the write said not "
                "to (If-None-Match, ifGenerationMatch): two sessions could not be kept apart. Use "
                "another store, or mount the bucket and give its path."
            )
        return taken

    def beat(self) -> bool:
        found = self._look(self._store)
        return self._wrote(found) and self._store.replace(self._name, self._next(), str(found[1]))

    def _wrote(self, found: _Found | None) -> TypeGuard[_Found]:
        """Whether a record is this session's, also one of a write whose answer was lost."""
        return found is not None and (parse_record(found[0]) or {}).get("token") == self._token

    def is_ours(self) -> bool:
        return self._wrote(self._look(self._store))

    def remove(self) -> None:
        if self._wrote(self.look()):
            self._patient.remove(self._name)

    def close(self) -> None:
        """Objects need no closing."""


def _now() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where the system has one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


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
        cut = content.startswith(_BEGINNING) or _BEGINNING.startswith(content)
        return {} if cut else None
    return record if record == {} or (isinstance(record, dict) and "pid" in record) else None


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


def _runs(holder: dict[str, Any]) -> bool | None:
    """Whether the process that wrote a record runs; None: it ran elsewhere."""
    here = _here()
    if any(holder.get(name) != here[name] for name in ("host", "boot", "namespace")):
        return None
    pid = holder.get("pid")
    found = _process_start(pid) if isinstance(pid, int) and 0 < pid < 2**31 else None
    return found is not None and found == holder.get("process_start")


def _record() -> dict[str, Any]:
    """What a holder writes."""
    return {**_here(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}


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
