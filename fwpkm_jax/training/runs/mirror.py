"""A run in a bucket: a folder of this machine that is filled from it and written back.

Training works on the folder, with the same files, checkpoints and checksums as on any disk. A
thread writes what is whole there to the bucket:

- A small file is one object, which the store replaces at once.
- A checkpoint's files go to `checkpoints/STEP-RANDOM/`; then one object, `checkpoints/STEP.json`,
  names the folder and every file's size and SHA-256. Without it there is no checkpoint, whatever
  a killed upload left, and no upload ever writes into the folder of another.

Orbax itself completes a checkpoint in S3 by copying objects one by one, so a kill could leave a
part that looks whole; this is why it writes to the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fwpkm_jax.addresses import scheme_of
from fwpkm_jax.outside_files import OutsideFileError, parse_json
from fwpkm_jax.stores import Store, checked_name
from fwpkm_jax.training.runs.lock import NAME as LOCK
from fwpkm_jax.training.runs.store_lock import StoreLock

EVERY = 10.0
"""Seconds between two looks for what to write back."""
_CHECKPOINTS = "checkpoints"
_MARKER = re.compile(rf"{_CHECKPOINTS}/(\d+)\.json")
_FOLDER = re.compile(rf"{_CHECKPOINTS}/((\d+)-[0-9a-f]{{16}})/.+")
# Of this machine and this session alone; and memories, which their own sessions read and write.
_NOT_WRITTEN = (LOCK, _CHECKPOINTS, "damaged_checkpoints", "wandb", "memories")
_logger = logging.getLogger(__name__)

Which = Literal["all", "newest", "none"] | int
"""Checkpoints to copy; a number is a step."""


class Mirror:
    """A run in a bucket, as a folder of this machine.

    Attributes:
      folder: the folder, new and empty before `fetch`; `close` removes it.
    """

    def __init__(self, address: str, *, say: Callable[[str], None] = lambda line: None) -> None:
        """Makes the folder, in the system's place for temporary files (`TMPDIR`).

        Raises:
          ValueError: see `Store`.
        """
        self.store = Store(address)
        self.folder = Path(tempfile.mkdtemp(prefix="fwpkm-run-"))
        self._say = say
        self._lock: StoreLock | None = None
        self._written: dict[str, tuple[int, int]] = {}
        self._steps: set[int] = set()
        self._working = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def fetch(self, checkpoints: Which = "all") -> None:
        """Fills the folder: small files, and whole checkpoints.

        Args:
          checkpoints: which of them, if they are there.

        Raises:
          OSError: the store cannot be asked.
        """
        sizes = self.store.sizes()
        for name in sizes:
            if name.split("/")[0] not in _NOT_WRITTEN:
                file = self.folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                self.store.download(name, file)
                self._written[name] = _signature(file)
        steps = sorted(int(found[1]) for name in sizes if (found := _MARKER.fullmatch(name)))
        if checkpoints == "newest":
            steps = steps[-1:]
        elif checkpoints != "all":
            steps = [step for step in steps if step == checkpoints]
        for step in steps:
            self._fetch_checkpoint(step, f"{_CHECKPOINTS}/{step}.json")

    def _fetch_checkpoint(self, step: int, marker: str) -> None:
        partial = self.folder / _CHECKPOINTS / f".{step}.{secrets.token_hex(8)}.tmp"
        partial.mkdir(parents=True)
        try:
            for name, (size, digest) in self._manifest(marker)[1].items():
                file = partial / name.partition("/")[2]
                file.parent.mkdir(parents=True, exist_ok=True)
                self.store.download(f"{_CHECKPOINTS}/{name}", file)
                if file.stat().st_size != size or _sha256(file) != digest:
                    raise OutsideFileError(
                        f"{self.store}/{_CHECKPOINTS}/{name}", "is not what was saved"
                    )
            partial.rename(self.folder / _CHECKPOINTS / str(step))
            self._steps.add(step)
        except (FileNotFoundError, OutsideFileError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            if self.store.versioned(marker) is not None:  # Not removed meanwhile by its session.
                _logger.warning("Skipping a damaged checkpoint: %s", error)

    def _manifest(self, marker: str) -> tuple[str, dict[str, tuple[int, str]]]:
        """The folder of a checkpoint, and size and hash of its files, whose names begin with it."""
        where = f"{self.store}/{marker}"
        stored = parse_json(self.store.read(marker), where, kind=dict, otherwise="delete it")
        folder, files = stored.get("folder"), stored.get("files")
        if not isinstance(folder, str) or not isinstance(files, dict):
            raise OutsideFileError(where, "names no folder and files", otherwise="delete it")
        found = {}
        for name, facts in files.items():
            checked_name(f"{folder}/{name}", where)
            size, digest = facts if isinstance(facts, list) and len(facts) == 2 else (None, None)
            found[f"{folder}/{name}"] = (size, digest)
        return folder, found

    def claim(self) -> None:
        """Takes the lock, fills the folder and begins to write back what changes there.

        What killed uploads left is removed.

        Raises:
          ValueError: another session holds the run, or the store cannot hold a lock.
          OSError: the store cannot be asked.
        """
        self._lock = StoreLock(self.store, say=self._say)
        self.fetch()
        named = set()
        sizes = self.store.sizes()
        for marker in filter(_MARKER.fullmatch, sizes):
            try:
                named.add(self._manifest(marker)[0])
            except OutsideFileError:  # Said by `fetch`.
                continue
        for name in sizes:
            if (found := _FOLDER.fullmatch(name)) and found[1] not in named:
                self.store.remove(name)
        self._thread = threading.Thread(target=self._work, name="run in a bucket", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(EVERY):
            try:
                self.write_back()
            except (OSError, ValueError) as error:  # Tried again; `close` raises it.
                _logger.warning("Not written yet: %s", error)

    def check(self) -> None:
        """Raises LostLockError if the lock is no longer this session's."""
        if self._lock is not None:
            self._lock.check()

    def write_back(self) -> None:
        """Writes what is whole in the folder and not yet in the bucket.

        Raises:
          LostLockError: the lock is no longer this session's.
          OSError: the store cannot be asked.
        """
        with self._working:
            # The records of a step are in the folder before its checkpoint.
            place = self.folder / _CHECKPOINTS
            steps = {int(x.name) for x in place.glob("*") if x.name.isdecimal()}
            for name in self._small_files():
                self.check()
                file = self.folder / name
                signature = _signature(file)
                if self._written.get(name) != signature:
                    self.store.write(name, file.read_bytes())
                    self._written[name] = signature
            for step in sorted(steps - self._steps):
                self._write_checkpoint(step)
            for step in sorted(self._steps - steps):
                self._remove_checkpoint(step)

    def _small_files(self) -> list[str]:
        """Names of the folder's files, `config.json` first: without it, it would be no run."""
        names = []
        for place, folders, files in os.walk(self.folder):
            at = Path(place).relative_to(self.folder)
            folders[:] = [x for x in folders if (at / x).parts[0] not in _NOT_WRITTEN]
            for name in files:
                hidden = name.startswith(".") or ".partial" in name
                file = Path(place, name)
                if not hidden and str(at / name) not in _NOT_WRITTEN and not file.is_symlink():
                    names.append((at / name).as_posix())
        return sorted(names, key=lambda name: (name != "config.json", name))

    def _write_checkpoint(self, step: int) -> None:
        place = self.folder / _CHECKPOINTS / str(step)
        folder = f"{step}-{secrets.token_hex(8)}"
        files: dict[str, Any] = {}
        try:
            for file in sorted(x for x in place.rglob("*") if x.is_file() and not x.is_symlink()):
                self.check()
                name = file.relative_to(place).as_posix()
                files[name] = [file.stat().st_size, _sha256(file)]
                self.store.upload(file, f"{_CHECKPOINTS}/{folder}/{name}")
        except FileNotFoundError:  # Newer ones took its place meanwhile.
            if place.exists():
                raise
            return
        if not place.exists():
            return
        self.check()
        marker = json.dumps({"folder": folder, "files": files}).encode()
        self.store.write(f"{_CHECKPOINTS}/{step}.json", marker)
        self._steps.add(step)

    def _remove_checkpoint(self, step: int) -> None:
        """Removes a checkpoint that is no longer kept; one that was set aside stays."""
        self._steps.discard(step)
        if list((self.folder / "damaged_checkpoints").glob(f"{step}*")):
            return
        self.check()
        marker = f"{_CHECKPOINTS}/{step}.json"
        _, files = self._manifest(marker)
        self.store.remove(marker)
        for name in files:
            self.store.remove(f"{_CHECKPOINTS}/{name}")

    def close(self) -> None:
        """Writes back what is left, gives the lock back and removes the folder.

        Raises:
          LostLockError: the lock is no longer this session's; the folder stays.
          OSError: the store cannot be asked; the folder stays, and the message names it.
        """
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            try:
                self.write_back()
            except (OSError, OutsideFileError) as error:
                raise OSError(
                    f"{str(error).rstrip('.')}; what is not yet there lies in {self.folder}."
                ) from error
        if self._lock is not None:
            self._lock.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def abandon(self) -> None:
        """Gives the lock back and removes the folder, without writing what is left."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._lock is not None:
            self._lock.release()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def local_copy(address: str, checkpoints: Which = "all") -> Iterator[Path]:
    """A run in a bucket as a folder of this machine, for reading; new small files are written back.

    Takes no lock: it may be read while it is trained, and every object is whole.

    Args:
      address: of the run.
      checkpoints: which of them are needed, see `Mirror.fetch`.

    Raises:
      FileNotFoundError: there is no run.
      OSError: the store cannot be asked.
    """
    mirror = Mirror(address)
    try:
        mirror.fetch(checkpoints)
        if "config.json" not in mirror._written:
            raise FileNotFoundError(
                f"{mirror.store}/config.json does not exist; {mirror.store} holds no run."
            )
        yield mirror.folder
        for name in mirror._small_files():
            if mirror._written.get(name) != _signature(mirror.folder / name):
                mirror.store.write(name, (mirror.folder / name).read_bytes())
    finally:
        shutil.rmtree(mirror.folder, ignore_errors=True)


@contextmanager
def run_folder(run_dir: str | Path, checkpoints: Which = "all") -> Iterator[Path]:
    """A run's directory; of one in a bucket, its `local_copy`."""
    if scheme_of(run_dir) is None:
        yield Path(run_dir)
        return
    with local_copy(str(run_dir), checkpoints) as folder:
        yield folder


@contextmanager
def new_run_folder(run_dir: str | Path) -> Iterator[Path]:
    """The path at which the body makes a run: `run_dir`, or a place from which it goes to a bucket.

    A body that raises leaves nothing in the bucket.

    Raises:
      ValueError: the bucket holds objects there, or another session makes a run there.
      OSError: the store cannot be asked.
    """
    if scheme_of(run_dir) is None:
        yield Path(run_dir)
        return
    mirror = Mirror(str(run_dir))
    try:
        if mirror.store.sizes():
            raise ValueError(f"{mirror.store} is not empty; choose another run directory.")
        mirror.claim()
        mirror.folder.rmdir()  # The body makes it.
        yield mirror.folder
    except BaseException:
        mirror.abandon()
        raise
    mirror.close()


def _signature(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
