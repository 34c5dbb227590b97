"""A folder of memories by name, and what they share.

`NAME.safetensors` is a memory. A fork stores the checksum of its base and what differs from it; the
base is kept as `bases/CHECKSUM.safetensors`, a second name of the file that was forked, or a copy
where the file system has no second names. Bases never change. One that no memory needs any more
goes when a memory is deleted.
"""

import contextlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fwpkm_jax.io.untrusted import OutsideFileError, shown
from fwpkm_jax.io.untrusted import reading as parsing
from fwpkm_jax.literals import some
from fwpkm_jax.memories import file, rows
from fwpkm_jax.memories.places import base_path, changing, is_name, path_of, reading
from fwpkm_jax.storage.lock import Lock

_OURS = re.compile(r"[0-9a-f]{64}|[0-9a-f]{16}\.tmp")
"""Names of bases, and of what a killed process leaves while it makes one."""
_MOST_BASES = 1000


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
    with reading(folder) as here:
        ending = file.SUFFIX
        files = (path for path in here.glob(f"*{ending}") if not path.is_dir())
        found = (path.name.removesuffix(ending) for path in files)
        return tuple(sorted(name for name in found if is_name(name)))


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
        there = some(names(folder), like=name)
        others = f"; there are {there}." if there else ", which holds none."
        raise FileNotFoundError(f"There is no memory {name!r} in {folder}{others}")
    return path


def fork(folder: str | Path, name: str, new: str) -> None:
    """Makes `new` a memory with the contents of `name`, which it shares on disk.

    It takes a few kilobytes, whatever the size of the tables. Both can be written from then on.

    Args:
      name: of the memory to fork, as it was last saved.

    Raises:
      FileNotFoundError: there is no memory `name`.
      ValueError: `new` is there already, or `name` cannot be read.

    Example:
      >>> from fwpkm_jax import memories
      >>> memories.fork("memories", "alice", "bob")  # doctest: +SKIP
    """
    with changing(folder, new, source=name) as (here, held):
        if path_of(here, new).exists():
            raise ValueError(
                f"The memory {new!r} exists in {here}; delete it first, or choose another name."
            )
        _fork(here, name, new, held)


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
    with changing(folder, name, source=point) as (here, held):
        _fork(here, point, name, held)


def delete(folder: str | Path, name: str, *, keep_forks: bool = False) -> None:
    """Deletes a memory, and bases that no memory needs any more.

    Args:
      keep_forks: delete it although it has forks. What they share with it stays on disk as long as
        they do.

    Raises:
      FileNotFoundError: there is no such memory.
      ValueError: it has forks; the message names them.

    Example:
      >>> from fwpkm_jax import memories
      >>> memories.delete("memories", "alice")  # doctest: +SKIP
    """
    with reading(folder) as here:
        existing(here, name)  # Before a folder or a lock is made for it.
    with changing(folder, name, removes_bases=True) as (here, held):
        path = existing(here, name)
        forks = forks_of(here, name)
        if forks and not keep_forks:
            raise ValueError(
                f"The memory {name!r} is the base of {some(forks)}, which share its contents; "
                "delete those first, or pass keep_forks=True, which keeps on disk what they share."
            )
        held.check()
        path.unlink()
        _remove_unused(here)


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

    Another session may replace the memory meanwhile, and remove its bases; then it is read again.

    Raises:
      ValueError: the file or a base is damaged or missing.
    """
    facts, own = file.read(path)
    base = base_of(facts)
    try:
        shared = {} if base is None else read_base(folder, base, path)
    except (OutsideFileError, FileNotFoundError):
        if file.read_facts(path)[0] == facts:
            raise
        return read_arrays(folder, path)
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
    path: Path, facts: dict[str, Any], own: dict[str, np.ndarray], shared: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """A memory's arrays, from what its file holds and its base's arrays."""
    problem = "is damaged: its arrays do not fit those of its base"
    with parsing(path, problem=problem, otherwise="delete it, or put back a copy"):
        return {
            name: rows.put_together(name, part, own, shared.get(name))
            for name, part in facts["parts"].items()
        }


def _fork(folder: str | Path, name: str, new: str, held: Lock) -> None:
    """Writes the memory `new`, which is held, with the contents of `name`."""
    source, target = existing(folder, name), path_of(folder, new)
    # Linked first, so that it is one file even if `name` is saved again meanwhile.
    link = base_path(folder, f"{secrets.token_hex(8)}.tmp")
    try:
        _second_name(source, link)
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


def _second_name(source: Path, link: Path) -> None:
    """Gives a file a second name; where the file system has none, such as a bucket's, a copy."""
    try:
        os.link(source, link)
    except OSError:  # What else is wrong hinders the copy, too.
        with source.open("rb") as old, link.open("xb") as new:
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())


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
