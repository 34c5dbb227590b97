"""Where memories lie: a folder of this machine, or one in a bucket through a copy on this machine.

The bucket holds the same files as a folder of memories, each as one object, which the store
replaces at once. A base is written before the fork that needs it, and removed after the last one,
so that a reader finds the memory of before or the new one, whole, wherever a session is killed.

Two locks keep sessions apart, on a disk and in a bucket alike: `NAME.lock` while a memory is held,
and `bases/lock` for the moments in which forks get a base or unneeded bases go.
"""

import contextlib
import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fwpkm_jax.io.atomic import own_folder, remove_unfinished
from fwpkm_jax.memories import file
from fwpkm_jax.storage.addresses import scheme_of
from fwpkm_jax.storage.lock import Lock, patiently
from fwpkm_jax.storage.stores import Store
from fwpkm_jax.storage.sync import FolderCopy, signature

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")
_OBJECT = re.compile(rf"(bases/)?{_NAME.pattern}{re.escape(file.SUFFIX)}")
_HEADER = 2**16  # Bytes that are read of each file first; most headers fit.
_LONGEST_HEADER = 2**24 + 8
_AT_ONCE = 256  # Headers.
_TRIES = 5  # To read what other sessions write meanwhile.
_logger = logging.getLogger(__name__)
_open = threading.local()

_held: dict[Path, tuple[int, Lock]] = {}
"""Locks of this process, and the thread that holds each."""


def is_name(name: str) -> bool:
    """Whether a memory can have this name."""
    return _NAME.fullmatch(name) is not None


def path_of(folder: str | Path, name: str) -> Path:
    """The file of a memory.

    Raises:
      ValueError: this cannot be the name of one.
    """
    if not is_name(name):
        raise ValueError(
            f"name={name!r} must be 1 to 100 ASCII letters, digits and . _ @ + -, and begin with a "
            "letter or digit."
        )
    return Path(folder) / f"{name}{file.SUFFIX}"


def base_path(folder: str | Path, checksum: str) -> Path:
    """The file of a base."""
    return Path(folder) / "bases" / f"{checksum}{file.SUFFIX}"


@contextlib.contextmanager
def hold(folder: str | Path, name: str) -> Iterator[Lock]:
    """While the context lasts, no other process or thread can change a memory.

    Hold it from loading to saving, so that of two conversations with one memory none is lost.
    `save`, `restore` and `delete` hold it themselves. In a bucket, what was read lies in the
    system's place for temporary files (`TMPDIR`) until the context ends.

    Raises:
      RunInUseError: another one holds it; the message names its process.

    Example:
      >>> from fwpkm_jax import memories
      >>> with memories.hold("memories", "alice"):
      ...     pass  # load, read, save
    """
    path = path_of(folder, name).absolute()
    thread, lock = _held.get(path, (None, None))
    if lock is not None and thread == threading.get_ident():
        yield lock
        return
    with contextlib.ExitStack() as stack:
        if scheme_of(folder) is not None:
            where: Path | Store = stack.enter_context(_copied(folder)).copy.store
        else:
            where = path.parent
            try:
                where.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = f"The folder of memories cannot be made ({error.strerror})"
                raise OSError(error.errno, reason, str(folder)) from error
        lock = Lock(
            where,
            name=f"{name}.lock",
            thing=f"The memory {name!r} in {folder if isinstance(where, Path) else where}",
            otherwise="choose another name",
            say=_say(where),
        )
        stack.callback(lock.release)
        if isinstance(where, Path):
            remove_unfinished(path)
        _held[path] = threading.get_ident(), lock
        stack.callback(_held.pop, path)
        yield lock


@contextlib.contextmanager
def reading(
    folder: str | Path, name: str | None = None, *, headers: Iterable[str] | None = ()
) -> Iterator[Path]:
    """The folder, for reading; of one in a bucket, a copy with the names of all memories.

    Args:
      name: a memory that has its contents there, with the bases that it needs.
      headers: memories that have their headers; None: all files.

    Raises:
      StoreError: the store cannot be asked.
    """
    if scheme_of(folder) is None:
        yield Path(folder)
        return
    with _copied(folder) as place:
        place.look()
        if name is not None:
            place.fetch(name)
        place.fetch_headers(headers)
        yield place.copy.folder


@contextlib.contextmanager
def changing(
    folder: str | Path, name: str, *, source: str | None = None, removes_bases: bool = False
) -> Iterator[tuple[Path, Lock]]:
    """The folder, in which the body changes a memory, and the memory's lock, which is held.

    Of a folder in a bucket it is a copy, and what the body did is written back.

    Args:
      source: a memory of which it becomes a fork.
      removes_bases: whether bases that no memory needs go; all files have their headers then.

    Raises:
      RunInUseError: another session holds the memory, or the bases for too long.
      LostLockError: the memory is no longer held; it was not written.
      OSError: the store cannot be asked.
    """
    local = scheme_of(folder) is None
    with hold(folder, name) as held, contextlib.ExitStack() as stack:
        locks = [held]
        place = None if local else stack.enter_context(_copied(folder))
        if source is not None or removes_bases:
            where = Path(folder) if place is None else place.copy.store
            locks.append(stack.enter_context(_bases_held(where)))
        if place is None:
            yield Path(folder), held
            return
        place.look()
        place.fetch(source or name)
        place.fetch_headers(None if removes_bases else ())
        before = place.signature(name)
        yield place.copy.folder, held
        place.write_back(name, before, locks)


@contextlib.contextmanager
def _bases_held(where: Path | Store) -> Iterator[Lock]:
    """While the context lasts, no other session forks a memory or removes bases."""
    if isinstance(where, Path):
        own_folder(where / "bases")
    held = patiently(
        lambda: Lock(
            where,
            name="bases/lock",
            thing=f"What memories in {where} share",
            otherwise="try again",
            say=_say(where),
        )
    )
    try:
        yield held
    finally:
        held.release()


def _say(where: Path | Store) -> Callable[[str], None]:
    """How a lock tells whom it waits for: in a bucket after any kill, on a disk hardly ever."""
    return _logger.warning if isinstance(where, Store) else _logger.info


class _Copied:
    """Memories in a bucket as a folder of this machine.

    Every memory and base of the bucket has a file here, of its name and size. Only what is asked
    for has contents: `fetch` and `fetch_headers`.

    Attributes:
      copy: the files and the objects.
      users: how many contexts need it.
    """

    def __init__(self, store: Store) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fwpkm-memories-"))
        (folder / "bases").mkdir()
        self.copy, self.users = FolderCopy(store, folder, holds=_OBJECT.fullmatch), 0
        self._headers: dict[str, object] = {}

    def look(self) -> None:
        """Makes the files those of the bucket; those that changed there lose their contents."""
        copy, before = self.copy, self.copy.there
        copy.look()
        for name in self._files() - copy.there.keys():
            (copy.folder / name).unlink()
        for name, now in copy.there.items():
            path = copy.folder / name
            # A deletion that failed in the bucket leaves no file.
            if before.get(name) != now or not path.exists():
                copy.forget(name)
                self._headers.pop(name, None)
                path.unlink(missing_ok=True)  # It may be a second name of a base.
                with path.open("xb") as hollow:
                    hollow.truncate(now.size)

    def _files(self) -> set[str]:
        folder = self.copy.folder
        paths = [*folder.glob(f"*{file.SUFFIX}"), *folder.glob(f"bases/*{file.SUFFIX}")]
        return {path.relative_to(folder).as_posix() for path in paths}

    def fetch(self, name: str) -> None:
        """Gives a memory, and the bases that it needs, their contents, if they are there."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):  # Replaced or deleted meanwhile.
                return self._fetch(name + file.SUFFIX)
            self.look()

    def _fetch(self, name: str) -> None:
        needed: list[str] = []
        while name in self.copy.there and name not in needed:
            needed.append(name)
            self.copy.fetch([name])
            try:
                base = file.read_facts(self.copy.folder / name)[0].get("base")
            except ValueError:  # Said by the reader.
                return
            if base is None:
                return
            name = f"bases/{base['checksum']}{file.SUFFIX}"
        if needed and name not in needed:
            raise FileNotFoundError(name)

    def fetch_headers(self, names: Iterable[str] | None) -> None:
        """Gives the files their headers, without arrays; None: all of them."""
        for _ in range(_TRIES):
            there = self.copy.there
            wanted = there if names is None else [name + file.SUFFIX for name in names]
            sizes = {
                name: there[name].size
                for name in sorted(wanted)
                if name in there and name not in self._headers and not self.copy.is_fetched(name)
            }
            if not sizes:
                return
            self._fetch_starts({name: min(size, _HEADER) for name, size in sizes.items() if size})
            longer = {}
            for name, size in sizes.items():
                with (self.copy.folder / name).open("rb") as header:
                    length = 8 + int.from_bytes(header.read(8), "little")
                if _HEADER < length <= min(size, _LONGEST_HEADER):
                    longer[name] = length
            self._fetch_starts(longer)
            self._headers |= {name: there[name] for name in sizes}
            self.look()  # Those that were replaced meanwhile are read again.

    def _fetch_starts(self, lengths: dict[str, int]) -> None:
        names = list(lengths)
        for first in range(0, len(names), _AT_ONCE):
            some = {name: lengths[name] for name in names[first : first + _AT_ONCE]}
            for name, content in self.copy.store.starts(some).items():
                with (self.copy.folder / name).open("r+b") as header:
                    header.write(content)

    def write_back(self, name: str, before: object, locks: Iterable[Lock]) -> None:
        """Writes to the bucket what a change of one memory made here.

        Args:
          before: `signature(name)` before the change.
          locks: checked before each write; if one is lost, the rest is not written.
        """
        memory = name + file.SUFFIX
        now, there = self._files(), set(self.copy.there)
        new = sorted(x for x in now - there if x.startswith("bases/"))
        if memory in now and self.signature(name) != before:
            new.append(memory)
        gone = sorted(there - now, key=lambda x: (x != memory, x))
        for change, names in ((self.copy.put, new), (self.copy.remove, gone)):
            for one in names:
                for lock in locks:
                    lock.check()
                change(one)

    def signature(self, name: str) -> object:
        """What changes when a memory's file here is replaced; None if there is none."""
        try:
            return signature(self.copy.folder / (name + file.SUFFIX))
        except FileNotFoundError:
            return None

    def said(self, text: str) -> str:
        """A text that names the bucket in place of the folder."""
        return text.replace(str(self.copy.folder), str(self.copy.store))


@contextlib.contextmanager
def _copied(folder: str | Path) -> Iterator[_Copied]:
    """The copy of a folder in a bucket; in a context of the same thread the same one.

    Errors of the body name the bucket in its place. What was fetched lasts as long as the
    outermost context, such as `hold`.

    Raises:
      ValueError: see `Store`.
    """
    store = Store(str(folder))
    places: dict[str, _Copied] = _open.__dict__.setdefault("places", {})
    place = places.get(store.address)
    if place is None:
        place = places[store.address] = _Copied(store)
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
            shutil.rmtree(place.copy.folder, ignore_errors=True)
