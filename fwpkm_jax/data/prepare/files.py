"""Checksums of files, and locks that admit one process per file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

from fwpkm_jax.data.prepare.records import Part
from fwpkm_jax.whole_files import open_own


class Checksum(TypedDict):
    """Size and checksum of a file."""

    bytes: int
    sha256: str


def checksum(path: Path) -> Checksum:
    """Size and SHA-256 of a file."""
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


class InputChecksums:
    """The checksums of all files read so far; a file that changes in between is an error.

    A process hashes each file before it first reads it, whatever its size and time, and again only
    where these differ later.
    """

    def __init__(self, known: dict[str, Checksum]):
        self._known = known
        self._stamps: dict[str, tuple[int, int]] = {}

    def add(self, part: Part) -> None:
        """Records the files of a part.

        Raises:
          ValueError: a file has changed since it was recorded.
        """
        for name, file in part.files.items():
            self._add(name, file)

    def _add(self, name: str, file: Path) -> None:
        status, known = file.stat(), self._known.get(name)
        stamp = status.st_size, status.st_mtime_ns
        if self._stamps.get(name) == stamp:
            return
        now = checksum(file)
        if known and known["sha256"] != now["sha256"]:
            raise ValueError(
                f"{file} has changed since the preparation began (SHA-256 {now['sha256']}, was "
                f"{known['sha256']}); put it back, or delete the .partial files and start again."
            )
        self._known[name], self._stamps[name] = now, stamp

    @property
    def known(self) -> dict[str, Checksum]:
        """The checksums by the names that parts give their files."""
        return self._known


@contextlib.contextmanager
def hold(path: Path) -> Iterator[Callable[[], None]]:
    """Keeps other processes from writing `path` at the same time.

    Yields a function to call before each write: it raises ValueError once the lock is gone.

    Raises:
      ValueError: another process is writing it, or something else is in the lock's place.
    """
    lock = path.with_name(f"{path.name}.lock")
    file = open_own(lock, os.O_RDWR | os.O_CREAT)
    try:
        if os.fstat(file).st_size:
            raise ValueError(f"{lock} is not a lock of this program; move it away and try again.")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(file), lock.lstat())
        except (BlockingIOError, FileNotFoundError):
            ours = False  # Another process holds it, or removes it now.
        if not ours:
            raise ValueError(
                f"Another process is writing {path}; wait for it, or give another output."
            )

        def check() -> None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), lock.lstat()):
                    return
            raise ValueError(
                f"Stopped before the next write: {lock}, by which this process held {path}, was "
                "removed or replaced. Run the command again once no other process writes it."
            )

        try:
            yield check
        finally:
            with contextlib.suppress(ValueError, OSError):
                check()
                lock.unlink()
    finally:
        os.close(file)
