"""Memories in a bucket: a folder of this machine that is filled from it and written back.

The bucket holds the same files as a folder of memories, each as one object, which the store
replaces at once. A base is written before the fork that needs it, and removed after the last one,
so that a reader finds the memory of before or the new one, whole, wherever a session is killed.
Two locks keep sessions apart: `NAME.lock` while a memory is held, and `bases/lock` for the moments
in which forks get a base or unneeded bases go.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fwpkm_jax.memories import file
from fwpkm_jax.stores import Listed, Store
from fwpkm_jax.training.runs.lock import RunInUseError
from fwpkm_jax.training.runs.store_lock import StoreLock

_OBJECT = re.compile(rf"(bases/)?[A-Za-z0-9][A-Za-z0-9._@+-]{{0,99}}{re.escape(file.SUFFIX)}")
_HEADER = 2**16  # Bytes that are read of each file first; most headers fit.
_LONGEST_HEADER = 2**24 + 8
_AT_ONCE = 256  # Headers.
_TRIES = 5  # To read what other sessions write meanwhile.
_LONGEST_WAIT = 60.0  # Seconds that another session may hold the bases.
_logger = logging.getLogger(__name__)
_open = threading.local()


class Place:
    """Memories in a bucket as a folder of this machine.

    Every memory and base of the bucket has a file here, of its name and size. Only what is asked
    for has contents: `fetch` and `fetch_headers`.

    Attributes:
      store: the bucket's folder.
      folder: on this machine.
      users: how many contexts need it.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.users = store, 0
        self.folder = Path(tempfile.mkdtemp(prefix="fwpkm-memories-"))
        (self.folder / "bases").mkdir()
        self._listed: dict[str, Listed] = {}
        self._headers: set[str] = set()
        self._whole: set[str] = set()

    def look(self) -> None:
        """Makes the files those of the bucket; those that changed there lose their contents."""
        found = {name: x for name, x in self.store.listed().items() if _OBJECT.fullmatch(name)}
        for name in self._files() - found.keys():
            (self.folder / name).unlink()
        for name, now in found.items():
            before = self._listed.get(name)
            # A base is named by its contents.
            same = before and before.size == now.size and name.startswith("bases/")
            path = self.folder / name
            # A deletion that failed in the bucket leaves no file.
            if not (before == now or same) or not path.exists():
                self._headers.discard(name)
                self._whole.discard(name)
                path.unlink(missing_ok=True)  # It may be a second name of a base.
                with path.open("xb") as hollow:
                    hollow.truncate(now.size)
        self._listed = found

    def _files(self) -> set[str]:
        paths = [*self.folder.glob(f"*{file.SUFFIX}"), *self.folder.glob(f"bases/*{file.SUFFIX}")]
        return {path.relative_to(self.folder).as_posix() for path in paths}

    def fetch(self, name: str) -> None:
        """Gives a memory, and the bases that it needs, their contents, if they are there."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):  # Replaced or deleted meanwhile.
                return self._fetch(name + file.SUFFIX)
            self.look()

    def _fetch(self, name: str) -> None:
        needed: list[str] = []
        while name in self._listed and name not in needed:
            needed.append(name)
            if name not in self._whole:
                partial = self.folder / f".{secrets.token_hex(8)}.tmp"
                self.store.download(name, partial)
                partial.replace(self.folder / name)
                self._whole.add(name)
            try:
                base = file.read_facts(self.folder / name)[0].get("base")
            except ValueError:  # Said by the reader.
                return
            if base is None:
                return
            name = f"bases/{base['checksum']}{file.SUFFIX}"
        if needed and name not in needed:
            raise FileNotFoundError(name)

    def fetch_headers(self, *names: str) -> None:
        """Gives the files their headers, without arrays; without names all of them."""
        for _ in range(_TRIES):
            lacking = self._listed.keys() - self._headers - self._whole
            if names:
                lacking &= {name + file.SUFFIX for name in names}
            sizes = {name: self._listed[name].size for name in sorted(lacking)}
            self._fetch_starts({name: min(size, _HEADER) for name, size in sizes.items() if size})
            longer = {}
            for name, size in sizes.items():
                with (self.folder / name).open("rb") as header:
                    length = 8 + int.from_bytes(header.read(8), "little")
                if _HEADER < length <= min(size, _LONGEST_HEADER):
                    longer[name] = length
            self._fetch_starts(longer)
            self._headers |= lacking
            if not lacking:
                return
            self.look()  # Those that were replaced meanwhile are read again.

    def _fetch_starts(self, lengths: dict[str, int]) -> None:
        names = list(lengths)
        for first in range(0, len(names), _AT_ONCE):
            some = {name: lengths[name] for name in names[first : first + _AT_ONCE]}
            for name, content in self.store.starts(some).items():
                with (self.folder / name).open("r+b") as header:
                    header.write(content)

    def write_back(self, name: str, before: object, checks: Sequence[Callable[[], None]]) -> None:
        """Writes to the bucket what a change of one memory made here.

        Args:
          name: of the memory.
          before: `signature(name)` before the change.
          checks: called before each write; if one raises, the rest is not written.
        """
        memory = name + file.SUFFIX
        now, there = self._files(), set(self._listed)
        for base in sorted(x for x in now - there if x.startswith("bases/")):
            self._upload(base, checks)
        if memory in now and self.signature(name) != before:
            self._upload(memory, checks)
        for gone in sorted(there - now, key=lambda x: (x != memory, x)):
            for check in checks:
                check()
            self.store.remove(gone)
            del self._listed[gone]

    def _upload(self, name: str, checks: Sequence[Callable[[], None]]) -> None:
        for check in checks:
            check()
        self._listed.pop(name, None)  # What is here is not there, should it fail.
        self.store.upload(self.folder / name, name)
        self._listed[name] = self.store.listed_one(name)
        self._whole.add(name)

    def signature(self, name: str) -> object:
        """What changes when a memory's file here is replaced; None if there is none."""
        try:
            facts = (self.folder / (name + file.SUFFIX)).stat()
        except FileNotFoundError:
            return None
        return facts.st_ino, facts.st_size, facts.st_mtime_ns

    def said(self, text: str) -> str:
        """A text that names the bucket in place of the folder."""
        return text.replace(str(self.folder), str(self.store))


@contextlib.contextmanager
def opened(folder: str | Path) -> Iterator[Place]:
    """The folder of this machine; in a context of the same thread the same one.

    Errors of the body name the bucket in its place. What was fetched lasts as long as the
    outermost context, such as `hold`.

    Raises:
      ValueError: see `Store`.
    """
    store = Store(str(folder))
    places: dict[str, Place] = _open.__dict__.setdefault("places", {})
    place = places.get(store.address)
    if place is None:
        place = places[store.address] = Place(store)
    place.users += 1
    try:
        yield place
    except (OSError, ValueError) as error:
        error.args = tuple(place.said(x) if isinstance(x, str) else x for x in error.args)
        if isinstance(error, OSError) and error.filename is not None:
            error.strerror = place.said(error.strerror or "")
            error.filename = place.said(str(error.filename))
        raise
    finally:
        place.users -= 1
        if not place.users:
            del places[store.address]
            shutil.rmtree(place.folder, ignore_errors=True)


@contextlib.contextmanager
def fetched(folder: str | Path, name: str | None = None) -> Iterator[Path]:
    """The folder of this machine with the names of all memories, and one memory's contents."""
    with opened(folder) as place:
        place.look()
        if name is not None:
            place.fetch(name)
        yield place.folder


@contextlib.contextmanager
def described(folder: str | Path, *names: str) -> Iterator[Place]:
    """The folder of this machine with the headers of some memories; without names of all files."""
    with opened(folder) as place:
        place.look()
        place.fetch_headers(*names)
        yield place


@contextlib.contextmanager
def changed(
    folder: str | Path,
    name: str,
    check: Callable[[], None],
    *,
    source: str | None = None,
    headers: bool = False,
) -> Iterator[Path]:
    """The folder of this machine, in which the body changes a memory, and writes it back.

    Args:
      folder: in the bucket.
      name: of the memory, which is held.
      check: of its lock.
      source: a memory of which it becomes a fork.
      headers: whether the body looks at all other memories, and may remove bases.

    Raises:
      LostLockError: the memory is no longer held; it was not written.
      OSError: the store cannot be asked.
    """
    with opened(folder) as place, contextlib.ExitStack() as held:
        checks = [check]
        if source is not None or headers:
            checks.append(held.enter_context(_bases_locked(place.store)).check)
        place.look()
        place.fetch(name if source is None else source)
        if headers:
            place.fetch_headers()
        before = place.signature(name)
        yield place.folder
        place.write_back(name, before, checks)


def lock(folder: str | Path, name: str) -> StoreLock:
    """The lock of a memory.

    Raises:
      RunInUseError: another session holds it; the message names its process.
    """
    store = Store(str(folder))
    return StoreLock(
        store,
        name=f"{name}.lock",
        thing=f"The memory {name!r} in {store}",
        otherwise="choose another name",
        say=_logger.warning,
    )


@contextlib.contextmanager
def _bases_locked(store: Store) -> Iterator[StoreLock]:
    """While the context lasts, no other session forks a memory or removes bases."""
    deadline = time.monotonic() + _LONGEST_WAIT
    while True:
        try:
            held = StoreLock(
                store,
                name="bases/lock",
                thing=f"What memories in {store} share",
                otherwise="try again",
                say=_logger.warning,
            )
            break
        except RunInUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    try:
        yield held
    finally:
        held.release()
