"""Checksums of files, and locks that admit one process per file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from fwpkm_jax.data.prepare.records import Part


class Checksum(TypedDict):
    """Size and checksum of a file."""

    bytes: int
    sha256: str


class InputRecord(Checksum):
    """A file that was read; its time tells whether it must be hashed again."""

    mtime_ns: int


def checksum(path: Path) -> Checksum:
    """Size and SHA-256 of a file."""
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


class InputChecksums:
    """The checksums of all files read so far; a file that changes in between is an error.

    A file is hashed once, before it is first read, and again only where its size or time differs.
    """

    def __init__(self, known: dict[str, InputRecord]):
        self._known = known

    def add(self, part: Part) -> None:
        """Records the files of a part.

        Raises:
          ValueError: a file has changed since it was recorded.
        """
        for name, file in part.files.items():
            self._add(name, file)

    def _add(self, name: str, file: Path) -> None:
        status, known = file.stat(), self._known.get(name)
        if known and (known["bytes"], known["mtime_ns"]) == (status.st_size, status.st_mtime_ns):
            return
        now = checksum(file)
        if known and known["sha256"] != now["sha256"]:
            raise ValueError(
                f"{file} has changed since the preparation began (SHA-256 {now['sha256']}, was "
                f"{known['sha256']}); put it back, or delete the .partial files and start again."
            )
        self._known[name] = {**now, "mtime_ns": status.st_mtime_ns}

    @property
    def known(self) -> dict[str, InputRecord]:
        """The checksums by the names that parts give their files."""
        return self._known


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keeps other processes from writing `path` at the same time.

    Raises:
      ValueError: another process is writing it.
    """
    lock = path.with_name(f"{path.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"Another process is writing {path}; wait for it, or give another output."
            ) from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
