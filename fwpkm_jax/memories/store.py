"""A folder of memories by name, and what they share; it may lie in a bucket, see `bucket`.

`NAME.safetensors` is a memory. A fork stores the checksum of its base and what differs from it; the
base is kept as `bases/CHECKSUM.safetensors`, a second name of the file that was forked. Bases never
change. One that no memory needs any more goes when a memory is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fwpkm_jax.addresses import scheme_of
from fwpkm_jax.literals import some
from fwpkm_jax.memories import bucket, file, rows
from fwpkm_jax.outside_files import OutsideFileError, reading, shown
from fwpkm_jax.training.runs.lock import RunLock
from fwpkm_jax.training.runs.store_lock import StoreLock
from fwpkm_jax.whole_files import open_own, own_folder, remove_unfinished

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")
_OURS = re.compile(r"[0-9a-f]{64}|[0-9a-f]{16}\.tmp")
"""Names of bases, and of what a killed process leaves while it makes one."""
_MOST_BASES = 1000

_held: dict[Path, tuple[int, RunLock | StoreLock]] = {}
"""Locks of this process, and the thread that holds each."""


class Description(NamedTuple):
    """What is known of a saved memory without reading its arrays.

    Attributes:
      name: of the memory.
      saved: when, as `2026-11-22T15:04:05+0000`.
      origin: what whoever saved it said about where it comes from.
      note: a JSON value that was saved with it.
      keep: "all", or "memory" for one without caches.
      num_read: tokens that each sequence has read.
      base: name of the memory that it was forked from; None if it stands alone.
      forks: names of the memories that were forked from it.
      num_bytes: of its file.
      rows: rows of each array that the file holds itself, and all rows of the array.
    """

    name: str
    saved: str
    origin: str
    note: Any
    keep: str
    num_read: tuple[int, ...]
    base: str | None
    forks: tuple[str, ...]
    num_bytes: int
    rows: dict[str, tuple[int, int]]


def names(folder: str | Path) -> tuple[str, ...]:
    """Names of the memories in a folder, sorted; none if there is no folder.

    Example:
      >>> from fwpkm_jax import memories
      >>> memories.names("memories")
      ()
    """
    if scheme_of(folder) is not None:
        with bucket.fetched(folder) as here:
            return names(here)
    folder = Path(folder)
    if not folder.is_dir():
        return ()
    ending = file.SUFFIX
    files = (path for path in folder.glob(f"*{ending}") if not path.is_dir())
    found = (path.name.removesuffix(ending) for path in files)
    return tuple(sorted(name for name in found if is_name(name)))


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


def existing(folder: str | Path, name: str) -> Path:
    """The file of a memory that is there.

    Raises:
      FileNotFoundError: it is not; the error names some of those that are.
      OutsideFileError: there is something else of its name.
    """
    path = path_of(folder, name)
    if os.path.lexists(path) and not path.is_file():
        raise OutsideFileError(path, "is no file", otherwise="remove it, or choose another name")
    if not path.is_file():
        there = some(names(folder), like=name) or "no memory"
        raise FileNotFoundError(f"There is no memory {name!r} in {folder}, but {there}.")
    return path


@contextlib.contextmanager
def hold(folder: str | Path, name: str) -> Iterator[RunLock | StoreLock]:
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
    with contextlib.ExitStack() as place:
        if scheme_of(folder) is not None:
            place.enter_context(bucket.opened(folder))
            lock = bucket.lock(folder, name)
        else:
            lock = _lock(folder, path, name)
        _held[path] = threading.get_ident(), lock
        try:
            yield lock
        finally:
            del _held[path]
            lock.release()


def _lock(folder: str | Path, path: Path, name: str) -> RunLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"The folder of memories cannot be made ({error.strerror})"
        raise OSError(error.errno, reason, str(folder)) from error
    lock = RunLock(
        path.parent,
        name=f"{name}.lock",
        thing=f"The memory {name!r} in {folder}",
        otherwise="choose another name",
    )
    remove_unfinished(path)
    return lock


def fork(folder: str | Path, name: str, new: str) -> None:
    """Makes `new` a memory with the contents of `name`, which it shares on disk.

    It takes a few kilobytes, whatever the size of the tables. Both can be written from then on.

    Args:
      folder: of the memories.
      name: of the memory to fork, as it was last saved.
      new: name of the fork.

    Raises:
      FileNotFoundError: there is no memory `name`.
      ValueError: `new` is there already, or `name` cannot be read.

    Example:
      >>> from fwpkm_jax import memories
      >>> memories.fork("memories", "alice", "bob")  # doctest: +SKIP
    """
    with hold(folder, new) as held:
        if scheme_of(folder) is not None:
            with bucket.changed(folder, new, held.check, source=name) as here:
                return fork(here, name, new)
        if path_of(folder, new).exists():
            raise ValueError(
                f"The memory {new!r} exists in {folder}; delete it first, or choose another name."
            )
        _fork(folder, name, new, held)


def restore(folder: str | Path, name: str, point: str) -> None:
    """Makes the memory `name` again what `point`, a fork of it, is.

    What was written to `name` since is lost. `point` stays.

    Raises:
      FileNotFoundError: there is no memory `point`.
      ValueError: `point` cannot be read, or both names are one.

    Example:
      >>> from fwpkm_jax import memories
      >>> memories.restore("memories", "alice", "alice@monday")  # doctest: +SKIP
    """
    if name == point:
        raise ValueError(f"point={point!r} is the memory itself; name a fork of it.")
    with hold(folder, name) as held:
        if scheme_of(folder) is not None:
            with bucket.changed(folder, name, held.check, source=point) as here:
                return restore(here, name, point)
        _fork(folder, point, name, held)


def delete(folder: str | Path, name: str, *, keep_forks: bool = False) -> None:
    """Deletes a memory, and bases that no memory needs any more.

    Args:
      folder: of the memories.
      name: of the memory.
      keep_forks: delete it although it has forks. What they share with it stays on disk as long as
        they do.

    Raises:
      FileNotFoundError: there is no such memory.
      ValueError: it has forks; the message names them.

    Example:
      >>> from fwpkm_jax import memories
      >>> memories.delete("memories", "alice")  # doctest: +SKIP
    """
    if scheme_of(folder) is not None:
        path_of(folder, name)
        with (
            hold(folder, name) as held,
            bucket.changed(folder, name, held.check, headers=True) as here,
        ):
            return delete(here, name, keep_forks=keep_forks)
    path = existing(folder, name)
    with hold(folder, name) as held, bases_locked(folder, exclusive=True):
        forks = forks_of(folder, name)
        if forks and not keep_forks:
            raise ValueError(
                f"The memory {name!r} is the base of {some(forks)}, which share its contents; "
                "delete those first, or pass keep_forks=True, which keeps on disk what they share."
            )
        held.check()
        path.unlink()
        _remove_unused(Path(folder))


def forks_of(folder: str | Path, name: str) -> tuple[str, ...]:
    """Names of the memories that were forked from one."""
    found = []
    for other in names(folder):
        with contextlib.suppress(ValueError, FileNotFoundError):
            base = base_of(file.read_facts(path_of(folder, other))[0])
            if other != name and base is not None and base["name"] == name:
                found.append(other)
    return tuple(found)


def base_of(facts: dict[str, Any]) -> dict[str, str] | None:
    """Name and checksum of a memory's base."""
    return facts.get("base")


def read_arrays(folder: str | Path, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of a memory's file, with what its bases hold.

    Raises:
      ValueError: the file or a base is damaged or missing.
    """
    facts, own = file.read(path)
    base = base_of(facts)
    shared = {} if base is None else read_base(folder, base, path)
    return facts, _put_together(path, facts, own, shared)


def read_base(folder: str | Path, base: dict[str, str], path: Path) -> dict[str, np.ndarray]:
    """All arrays of a base that the memory at `path` needs.

    Raises:
      ValueError: it is damaged or missing.
    """
    chain = []
    at: dict[str, str] | None = base
    while at is not None:
        link = base_path(folder, at["checksum"])
        if not link.is_file() or len(chain) > _MOST_BASES:
            problem = (
                f"needs its base, a former {shown(at['name'], 100)!r}, which is missing: {link}"
            )
            raise OutsideFileError(path, problem)
        facts, own = file.read(link, expected=at["checksum"])
        chain.append((link, facts, own))
        at = base_of(facts)
    arrays: dict[str, np.ndarray] = {}
    for link, facts, own in reversed(chain):
        arrays = _put_together(link, facts, own, arrays)
    return arrays


def _put_together(
    path: Path,
    facts: dict[str, Any],
    own: dict[str, np.ndarray],
    shared: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """A memory's arrays, from what its file holds and its base's arrays."""
    problem = "is damaged: its arrays do not fit those of its base"
    with reading(path, problem=problem, otherwise="delete it, or put back a copy"):
        return {
            name: rows.put_together(name, part, own, shared.get(name))
            for name, part in facts["parts"].items()
        }


def base_path(folder: str | Path, checksum: str) -> Path:
    """The file of a base."""
    return Path(folder) / "bases" / f"{checksum}{file.SUFFIX}"


@contextlib.contextmanager
def bases_locked(folder: str | Path, *, exclusive: bool = False) -> Iterator[None]:
    """While the context lasts, no base is removed; `exclusive`: nor does any get a new fork.

    It waits for other processes, which need it for moments. The system ends the lock with its
    process. On a file system without locks it does nothing.
    """
    try:
        bases = own_folder(Path(folder) / "bases")
        number = open_own(bases / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if exclusive or error.errno not in (errno.EROFS, errno.EACCES):
            raise
        yield  # Whoever may only read it removes no base.
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(number)


def _fork(folder: str | Path, name: str, new: str, held: RunLock | StoreLock) -> None:
    """Writes the memory `new`, which is held, with the contents of `name`."""
    source, target = existing(folder, name), path_of(folder, new)
    with bases_locked(folder):
        # Linked first, so that it is one file even if `name` is saved again meanwhile.
        link = base_path(folder, f"{secrets.token_hex(8)}.tmp")
        os.link(source, link)
        try:
            facts, checksum = file.read_facts(link)
            if all(part == "same" for part in facts["parts"].values()):
                base = base_of(facts) and {**facts["base"], "name": name}
            else:
                base = {"name": name, "checksum": checksum}
                link.replace(base_path(folder, checksum))
            facts |= {"base": base, "saved": now(), "parts": dict.fromkeys(facts["parts"], "same")}
            facts |= {"rows": {key: [0, total] for key, (_, total) in facts["rows"].items()}}
            file.write(target, {}, facts, check=held.check)
        finally:
            link.unlink(missing_ok=True)


def _remove_unused(folder: Path) -> None:
    """Removes bases that no memory needs, and what a killed process left; the bases are locked."""
    needed = set()
    for name in names(folder):
        path = path_of(folder, name)
        while True:
            try:
                base = base_of(file.read_facts(path)[0])
            except FileNotFoundError:
                break
            except ValueError:
                return  # What a damaged memory needs is not known.
            if base is None or base["checksum"] in needed:
                break
            needed.add(base["checksum"])
            path = base_path(folder, base["checksum"])
    for path in (folder / "bases").glob(f"*{file.SUFFIX}"):
        name = path.name.removesuffix(file.SUFFIX)
        if name not in needed and _OURS.fullmatch(name):
            path.unlink()


def now() -> str:
    """The time of saving."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
