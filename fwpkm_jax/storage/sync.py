"""Copies between a folder of this machine and one in a bucket.

An object appears whole or not at all, so a file needs no more than its upload. What consists of
several files counts once a last object names them:

- `Versions`, such as checkpoints. The files go to `NAME-RANDOM/`; then `NAME.json` names the folder
  and every file's size and SHA-256. Without it there is no version, whatever a killed upload left,
  and no upload ever writes into the folder of another. Several processes that save one together
  upload each its own files, and last the list of them, `NAME-RANDOM/.part-PROCESS`. The first
  process writes `NAME.json` once all lists are there.
- A folder that other programs read, such as an export: its `config.json` is written last, and
  nothing is read without it.

An error of the store is a `StoreError`, and never counts as damage: nothing is deleted, set aside
or left out for it.
"""

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fwpkm_jax.io.untrusted import OutsideFileError, parse_json
from fwpkm_jax.storage.addresses import scheme_of
from fwpkm_jax.storage.stores import Listed, Store, checked_name

_LAST = "config.json"
_AT_ONCE = 8  # Downloads.
_MOST_JSON = 2**26  # Bytes.
_MOST_SMALL = 2**27  # Of what is no weights, such as a tokenizer.
_MARKER = re.compile(r"(\d+)\.json")
_FOLDER = re.compile(r"((\d+)-[0-9a-f]{16})/.+")

Check = Callable[[], None]
"""Called before each write; if it raises, the rest is not written."""


class FolderCopy:
    """Files of a folder of this machine, each of which is an object of the same name.

    Attributes:
      store: the folder in the bucket.
      folder: on this machine.
      there: the objects when they were last listed or written, by name.
    """

    def __init__(
        self, store: Store, folder: Path, *, holds: Callable[[str], object] = lambda name: True
    ) -> None:
        """Reads and writes nothing.

        Args:
          store: the folder in the bucket.
          folder: on this machine.
          holds: whether an object of this name is one of the files.
        """
        self.store, self.folder, self._holds = store, folder, holds
        self.there: dict[str, Listed] = {}
        self._same: dict[str, tuple[Listed | None, tuple[int, ...]]] = {}

    def look(self) -> list[str]:
        """Lists the bucket, and returns the names of all objects. Raises as `Store.listed` does."""
        listed = self.store.listed()
        self.there = {name: x for name, x in listed.items() if self._holds(name)}
        return list(listed)

    def fetch(self, names: Iterable[str] | None = None, *, missing_ok: bool = False) -> None:
        """Downloads the objects that were listed and are not here as they are there.

        Args:
          names: of some; None: all of them.
          missing_ok: those that were removed since they were listed are left out.

        Raises:
          FileNotFoundError: one was removed since.
          OutsideFileError: one of JSON is larger than any that is read.
        """

        def fetch(name: str) -> None:
            size = self.there[name].size
            if name.endswith(".json") and size > _MOST_JSON:
                problem = f"has {size:,} bytes, and at most {_MOST_JSON:,} are expected"
                raise OutsideFileError(f"{self.store}/{name}", problem, otherwise="put it right")
            try:
                self._fetch(name)
            except FileNotFoundError:
                if not missing_ok:
                    raise

        wanted = list(self.there if names is None else names)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(fetch, (name for name in wanted if not self.is_fetched(name))))

    def is_fetched(self, name: str) -> bool:
        """Whether the file is here as it was listed."""
        return name in self._same and self._same[name][0] == self.there.get(name)

    def _fetch(self, name: str) -> None:
        file, listed = self.folder / name, self.there[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            self.store.download(name, partial)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        self._same[name] = listed, signature(file)

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of the files here that are not what was fetched or written."""
        return [
            name
            for name in names
            if name not in self._same or self._same[name][1] != signature(self.folder / name)
        ]

    def put(self, name: str) -> None:
        """Writes a file to the bucket.

        Raises:
          FileNotFoundError: it is not here.
        """
        now = signature(self.folder / name)
        # What is there is not known, should it fail.
        self.there.pop(name, None)
        self._same.pop(name, None)
        self.store.upload(self.folder / name, name)
        self.there[name] = self.store.listed_one(name)
        self._same[name] = self.there[name], now

    def remove(self, name: str) -> None:
        """Removes an object. Raises StoreError if the store cannot be asked."""
        self.store.remove(name)
        self.there.pop(name, None)
        self._same.pop(name, None)

    def forget(self, name: str) -> None:
        """The file here no longer counts as the object."""
        self._same.pop(name, None)


def signature(file: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced."""
    facts = file.stat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


class _Version(NamedTuple):
    folder: str
    files: dict[str, tuple[int, str]]
    """Size and SHA-256 of each by its name in the folder."""


class Part(NamedTuple):
    """Which of the processes that save the same versions together this one is."""

    process: int = 0
    """Its number; the first one, 0, writes the markers and removes versions."""
    processes: int = 1
    """How many there are."""
    session: str = ""
    """16 hexadecimal digits that they share, and that no other session has; "": there is one
    process."""


ALONE = Part()


class Versions:
    """Numbered folders, each of which is whole or absent in a bucket.

    Attributes:
      whole: numbers of those that `look` found or `write` wrote.
      damaged: numbers of those whose marker, or a file, is not what was written. Whatever belongs
        to them stays.
    """

    def __init__(
        self,
        store: Store,
        under: str,
        *,
        part: Part = ALONE,
        holds: Callable[[str], object] = lambda name: True,
    ) -> None:
        """Reads and writes nothing.

        Args:
          store: the folder in the bucket.
          under: name of the folder in it that has the versions.
          part: which process this one is.
          holds: whether this process writes a file of this name in a version.
        """
        self._store, self._under, self._part, self._holds = store, under, part, holds
        self._known: dict[int, _Version] = {}
        self._begun: dict[int, _Version] = {}
        self.damaged: dict[int, str] = {}

    @property
    def whole(self) -> set[int]:
        return self._known.keys() - self.damaged.keys()

    def _marker(self, number: int) -> str:
        return f"{self._under}/{number}.json"

    def look(self, names: Iterable[str]) -> None:
        """Reads the markers."""
        self._known, self.damaged = {}, {}
        for name in names:
            under, _, last = name.rpartition("/")
            if under == self._under and (found := _MARKER.fullmatch(last)):
                number = int(found[1])
                with contextlib.suppress(FileNotFoundError):  # Removed meanwhile by its session.
                    try:
                        self._known[number] = self._read(name)
                    except OutsideFileError as error:
                        self.damaged[number] = str(error)

    def _read(self, marker: str) -> _Version:
        where = f"{self._store}/{marker}"
        content = self._store.read(marker)
        stored = parse_json(content, where, kind=dict, otherwise="put back a copy")
        folder, files = stored.get("folder"), stored.get("files")
        if not isinstance(folder, str) or not isinstance(files, dict):
            raise OutsideFileError(where, "names no folder and files", otherwise="put back a copy")
        found = {}
        for name, facts in files.items():
            checked_name(f"{folder}/{name}", where)
            right = isinstance(facts, list) and list(map(type, facts)) == [int, str]
            if not right:
                raise OutsideFileError(where, "gives no size and hash", name, "put back a copy")
            found[name] = tuple(facts)
        return _Version(folder, found)

    def fetch(self, number: int, place: Path) -> bool:
        """Makes a new folder of this machine a copy of a version that `look` found.

        Returns:
          Whether it is; False: it is damaged, or was removed meanwhile. Then `damaged` says so.
        """
        version = self._known[number]
        partial = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")

        def download(name: str) -> None:
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            there = f"{self._under}/{version.folder}/{name}"
            for _ in range(2):  # A bit may be lost on the way.
                size, digest = version.files[name]
                self._store.download(there, file, expected=size)
                if _sha256(file) == digest:
                    return
            raise OutsideFileError(f"{self._store}/{there}", "is not what was saved")

        partial.mkdir(parents=True)
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(download, version.files))
            partial.rename(place)
        except (FileNotFoundError, OutsideFileError) as error:
            if self._store.versioned(self._marker(number)) is not None:
                self.damaged[number] = str(error)
            else:  # Removed meanwhile by its session.
                del self._known[number]
            return False
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return True

    def write(self, number: int, place: Path, check: Check) -> None:
        """Writes a folder of this machine as a version, unless it is removed meanwhile.

        An upload that failed goes on where it was. What was damaged under this number is kept.
        While another process still writes its files, the version is not whole; call it again.
        """
        random = f"{number}-{self._part.session or secrets.token_hex(8)}"
        folder, done = self._begun.setdefault(number, _Version(random, {}))
        try:
            for file in sorted(x for x in place.rglob("*") if x.is_file() and not x.is_symlink()):
                name = file.relative_to(place).as_posix()
                if name not in done and self._holds(name):
                    facts = file.stat().st_size, _sha256(file)
                    check()
                    self._store.upload(file, f"{self._under}/{folder}/{name}")
                    done[name] = facts
        except FileNotFoundError:  # Newer ones took its place meanwhile.
            if place.exists():
                raise
        lists = [f"{self._under}/{folder}/.part-{x}" for x in range(1, self._part.processes)]
        whole = self._joined(self._begun[number], lists)
        if place.exists() and whole is not None:
            check()
            if self._part.process:
                self._write(lists[self._part.process - 1], whole)
            else:
                if number in self.damaged:
                    self._keep_marker(number)
                self._write(self._marker(number), whole)
                for name in lists:
                    self._store.remove(name)
            self._known[number] = whole
            del self._begun[number]
            self.damaged.pop(number, None)

    def _joined(self, version: _Version, lists: list[str]) -> _Version | None:
        """A version with the files of all processes; None if one of them still writes."""
        if self._part.process:
            return version
        try:
            for name in lists:
                version = version._replace(files=version.files | self._read(name).files)
        except FileNotFoundError:
            return None
        return version

    def _write(self, name: str, version: _Version) -> None:
        """Writes which files a version, or a process' part of it, consists of."""
        self._store.write(name, json.dumps(version._asdict()).encode())

    def _keep_marker(self, number: int) -> None:
        """Moves the marker of a damaged version to `damaged_...`, so that its files stay."""
        found = self._store.versioned(self._marker(number))
        if found is not None:
            aside = f"damaged_{self._under}/{number}-{secrets.token_hex(8)}.json"
            self._store.write(aside, found[0])

    def remove(self, number: int, check: Check) -> None:
        """Removes a version. Raises StoreError if the store cannot be asked."""
        version = self._known[number]
        check()
        self._store.remove(self._marker(number))
        for name in version.files:
            self._store.remove(f"{self._under}/{version.folder}/{name}")
        del self._known[number]

    def remove_unfinished(self, names: Iterable[str], check: Check) -> None:
        """Removes what killed uploads left: files in folders that no marker names.

        Args:
          names: of the objects of the store, as given to `look` just before.
          check: see `Check`.
        """
        named = {version.folder for version in self._known.values()}
        aside = re.compile(rf"damaged_{self._under}/(\d+)-[0-9a-f]{{16}}\.json")
        # A damaged marker does not tell which of the folders of its number is its own.
        kept = {*self.damaged, *(int(x[1]) for x in map(aside.fullmatch, names) if x)}
        for name in names:
            under, _, rest = name.partition("/")
            found = _FOLDER.fullmatch(rest) if under == self._under else None
            if found and found[1] not in named and int(found[2]) not in kept:
                check()
                self._store.remove(name)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextlib.contextmanager
def made_in(folder: str | Path) -> Iterator[Path]:
    """The path at which the body makes a folder: `folder`, or a place from which it goes there.

    Raises:
      FileExistsError: the bucket holds objects there; nothing was made.
    """
    if scheme_of(folder) is None:
        yield Path(folder)
        return
    store = Store(str(folder))
    if store.sizes():
        raise FileExistsError(f"{store} exists; choose another name.")
    with tempfile.TemporaryDirectory(prefix="fwpkm-made-") as place:
        made = Path(place) / "folder"
        yield made
        files = [file.relative_to(made).as_posix() for file in made.rglob("*") if file.is_file()]
        for name in sorted(files, key=lambda name: (name == _LAST, name)):
            store.upload(made / name, name)


@contextlib.contextmanager
def fetched(folder: str | Path) -> Iterator[Path]:
    """A folder as it is on this machine; of one in a bucket, a copy that ends with the context.

    Large files that are not safetensors have no content in the copy: no import reads them.

    Raises:
      FileNotFoundError: the bucket holds no whole folder there.
    """
    if scheme_of(folder) is None:
        yield Path(folder)
        return
    store = Store(str(folder))
    with tempfile.TemporaryDirectory(prefix="fwpkm-fetched-") as place:
        copy = FolderCopy(store, Path(place))
        copy.look()
        if _LAST not in copy.there:
            raise FileNotFoundError(
                f"{store}/{_LAST} does not exist; {store} holds no whole folder."
            )
        large = [
            name
            for name, found in copy.there.items()
            if found.size > _MOST_SMALL and not name.endswith(".safetensors")
        ]
        for name in large:  # Their size is all that a reader takes note of.
            file = copy.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("xb") as hollow:
                hollow.truncate(copy.there[name].size)
        copy.fetch(copy.there.keys() - large)
        yield Path(place)
