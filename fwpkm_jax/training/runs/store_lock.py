"""A lock in a bucket: one session at a time writes to a run, or to a thing in a folder.

The object `lock` is made by a write that holds only if there is none (`Store.create`). The holder
writes it again every `BEAT` seconds, by a write that holds only if it is still the holder's
(`Store.replace`). Another session takes it over only after `SILENCE` seconds in which it did not
change, by such a write too: of two that try at once, one wins, and a holder that was suspended and
comes back finds that its lock is gone.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from fwpkm_jax.outside_files import OutsideFileError
from fwpkm_jax.stores import Store
from fwpkm_jax.training.runs.lock import (
    BEAT,
    NAME,
    SILENCE,
    LostLockError,
    RunInUseError,
    holder_name,
    parse_record,
)


class StoreLock:
    """The lock of a run in a bucket, or of a thing in a folder there. The constructor takes it;
    `release` gives it back.

    Args:
      store: the run, or the folder.
      name: of the lock's object in it.
      thing: what errors call the thing that is locked; "": the run.
      otherwise: what the user may do instead of waiting.
      say: prints a line, for example that an abandoned lock was taken over.

    Raises:
      RunInUseError: another session holds the lock; the message names its process, host and start.
      ValueError: the store ignores the conditions of writes, so that it can hold no lock.
      OSError: the store cannot be asked.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = NAME,
        thing: str = "",
        otherwise: str = "choose another --run_dir",
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._store, self._say = store, say
        self._name, self._thing, self._otherwise = name, thing or str(store), otherwise
        self._token = secrets.token_hex(8)
        self._started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._beats = 0
        self._content = self._record()
        self._writes = threading.Lock()
        if not store.create(self._name, self._content):
            self._take_over()
        if store.create(self._name, self._record()):
            raise ValueError(
                f"{store} writes an object although there is one and the write said not to "
                "(If-None-Match, ifGenerationMatch): two sessions could not be kept apart. Use "
                "another store, or mount the bucket and give its path."
            )
        self._alive_at = time.monotonic()
        self._lost = False
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="store lock", daemon=True)
        self._heart.start()

    def _record(self) -> bytes:
        self._beats += 1
        record = {"token": self._token, "beat": self._beats, "started": self._started}
        return json.dumps({**record, "host": socket.gethostname(), "pid": os.getpid()}).encode()

    def _take_over(self) -> None:
        """Waits whether the holder still writes its lock."""
        found = self._store.versioned(self._name)
        if found is not None:
            self._say(
                f"{self._store}/{self._name} belongs to {_name(found[0])}; waiting up to "
                f"{SILENCE:.0f} s to see whether that process still writes it."
            )
        deadline = time.monotonic() + SILENCE
        while found is not None and time.monotonic() < deadline:
            time.sleep(min(1.0, SILENCE / 10))
            now = self._store.versioned(self._name)
            if now is not None and now[1] != found[1]:
                raise self._in_use(now[0])
            found = now
        taken = (
            self._store.create(self._name, self._content)
            if found is None
            else self._store.replace(self._name, self._content, found[1])
        )
        if not taken:
            now = self._store.versioned(self._name)
            raise self._in_use(now[0] if now else b"{}")
        if found is not None:
            self._say(f"Took over {self._thing} from {_name(found[0])}, which is gone.")

    def _in_use(self, record: bytes) -> RunInUseError:
        return RunInUseError(
            f"{self._thing} is in use by {_name(record)}; wait until it ends, or {self._otherwise}."
        )

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            try:
                self._renew()
            except (OSError, OutsideFileError):
                # The store does not answer; `check` knows for how long.
                continue

    def _renew(self) -> None:
        with self._writes:
            found = self._store.versioned(self._name)
            ours = found is not None and found[0] == self._content
            record = self._record()
            if not ours or found is None or not self._store.replace(self._name, record, found[1]):
                self._lost = True
                return
            self._content, self._alive_at = record, time.monotonic()

    def check(self) -> None:
        """Call it before each write to what is locked; asks the store only after a missed beat.

        Raises:
          LostLockError: the lock is gone or another session's, or could not be written for so long
            that another session may have taken it over.
        """
        if not self._lost and time.monotonic() - self._alive_at > 1.5 * BEAT:
            self._renew()
        if self._lost:
            raise LostLockError(
                f"Stopped before the next write: {self._store}/{self._name}, by which this session "
                f"held {self._thing}, was removed or replaced. Start it again once no other "
                "session uses it; what was saved is whole."
            )

    def release(self) -> None:
        """Gives the lock back."""
        self._released.set()
        self._heart.join()
        with self._writes:
            found = self._store.versioned(self._name)
            if found is not None and found[0] == self._content:
                self._store.remove(self._name)


def _name(record: bytes) -> str:
    return holder_name(parse_record(record))
