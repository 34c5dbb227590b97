"""A lock that admits one process per file."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from fwpkm_jax.whole_files import open_own


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
