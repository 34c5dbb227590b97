"""A run in a bucket: a folder of this machine that is filled from it and written back.

Training works on the folder, with the same files, checkpoints and checksums as on any disk. A
thread writes what is whole there to the bucket: small files as objects, checkpoints as `Versions`.

Orbax itself completes a checkpoint in S3 by copying objects one by one, so a kill could leave a
part that looks whole; this is why it writes to the folder. Of several processes each has a folder
of its own, in which Orbax writes the arrays of its devices; they become one checkpoint in the
bucket, and are merged where it is fetched.

A store that does not answer raises `StoreError`.
"""

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fwpkm_jax.storage.addresses import scheme_of
from fwpkm_jax.storage.lock import NAME as LOCK
from fwpkm_jax.storage.lock import Lock
from fwpkm_jax.storage.repeated import Repeated
from fwpkm_jax.storage.stores import Store
from fwpkm_jax.storage.sync import ALONE, FolderCopy, Part, Versions

EVERY = 10.0
"""Seconds between two looks for what to write back."""
PATIENCE = 20.0
"""Seconds that the first process waits at the end for checkpoints of which others write a part."""
_CHECKPOINTS = "checkpoints"
# Of this machine and this session alone; and memories, which their own sessions read and write.
_NOT_WRITTEN = (LOCK, _CHECKPOINTS, f"damaged_{_CHECKPOINTS}", "wandb", "memories")
_logger = logging.getLogger(__name__)

Which = Literal["all", "newest", "none"] | int
"""Checkpoints to copy; a number is a step."""


class Mirror:
    """A run in a bucket, as a folder of this machine.

    Attributes:
      store: the run in the bucket.
      folder: the folder, new and empty before `fetch`; `close` removes it.
    """

    def __init__(
        self,
        address: str,
        *,
        say: Callable[[str], None] = lambda line: None,
        part: Part = ALONE,
    ) -> None:
        """Makes the folder, in the system's place for temporary files (`TMPDIR`).

        Args:
          address: of the run.
          say: prints a line.
          part: which of the processes that train the run this one is. The first one alone holds
            the lock and writes what is no checkpoint.

        Raises:
          ValueError: see `Store`.
        """
        self.store = Store(address)
        self.folder = Path(tempfile.mkdtemp(prefix="fwpkm-run-"))
        self._say, self._part = say, part
        self._lock: Lock | None = None
        self._files = FolderCopy(
            self.store, self.folder, holds=lambda name: name.split("/")[0] not in _NOT_WRITTEN
        )
        self._versions = Versions(self.store, _CHECKPOINTS, part=part, holds=self._writes)
        self._aside: set[str] = set()
        self._working = threading.Lock()
        self._writer: Repeated | None = None

    def _writes(self, name: str) -> bool:
        """Whether this process writes a file of a checkpoint."""
        # Orbax: `ITEM/ocdbt.process_1/...`, `ITEM/array_metadatas/process_1`.
        own = f"process_{self._part.process}"
        parts = name.split("/")
        return self._part.process == 0 or own in parts or f"ocdbt.{own}" in parts

    def fetch(self, checkpoints: Which = "all") -> list[str]:
        """Fills the folder: small files, and whole checkpoints.

        Args:
          checkpoints: which of them, if they are there.

        Returns:
          The names of all objects.
        """
        names = self._files.look()
        self._files.fetch(missing_ok=True)
        self._versions.look(names)
        for step in sorted(self._versions.whole, reverse=True):
            if checkpoints in ("all", "newest", step):
                place = self.folder / _CHECKPOINTS / str(step)
                if self._versions.fetch(step, place):
                    _merge(place)
                    if checkpoints == "newest":
                        break
        for problem in self._versions.damaged.values():
            _logger.warning("Skipping a damaged checkpoint: %s", problem)
        return names

    def claim(self) -> None:
        """Takes the lock, fills the folder and begins to write back what changes there.

        What killed uploads left is removed. Other processes call it once the first one has the
        lock.

        Raises:
          ValueError: another session holds the run, or the store cannot hold a lock.
          OSError: the store cannot be asked.
        """
        if self._part.process == 0:
            self._lock = Lock(self.store, say=self._say)
        names = self.fetch()
        if self._lock is not None:
            self._versions.remove_unfinished(names, self._lock.check)
        self._writer = Repeated(self._work, EVERY, name="run in a bucket")

    def _work(self) -> None:
        try:
            self.write_back()
        except (OSError, ValueError) as error:  # Tried again; `close` raises it.
            _logger.warning("Not written yet: %s", error)

    def check(self, *, ask: bool = True) -> None:
        """Raises LostLockError if the lock is no longer this session's; see `Lock.check`."""
        if self._lock is not None:
            self._lock.check(ask=ask)

    def write_back(self) -> bool:
        """Writes what is whole in the folder and not yet in the bucket.

        Returns:
          Whether all of it is there. False: other processes still write their parts.

        Raises:
          LostLockError: the lock is no longer this session's.
        """
        with self._working:
            # The records of a step are in the folder before its checkpoint.
            place = self.folder / _CHECKPOINTS
            steps = {int(x.name) for x in place.glob("*") if x.name.isdecimal()}
            if self._part.process == 0:
                self.write_files()
            versions = self._versions
            # One that was set aside stays in the bucket, also if its step is saved again.
            aside = {x.name for x in (self.folder / f"damaged_{_CHECKPOINTS}").glob("*")}
            for name in aside - self._aside:
                versions.damaged[int(name.partition(".")[0])] = "set aside"
            self._aside = aside
            for step in sorted(steps - versions.whole):
                versions.write(step, place / str(step), self.check)
            # The one before stays until the newest is whole.
            done = steps <= versions.whole
            for step in sorted(versions.whole - steps) if done and self._part.process == 0 else ():
                versions.remove(step, self.check)
            return done

    def write_files(self) -> None:
        """Writes the small files that changed. Raises as `write_back` does."""
        for name in self._files.changed(self._small_files()):
            self.check()
            self._files.put(name)

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

    def close(self) -> None:
        """Writes back what is left, gives the lock back and removes the folder.

        Raises:
          LostLockError: the lock is no longer this session's; the folder stays.
          OSError: the store cannot be asked; the folder stays, and the message names it.
        """
        if self._writer is not None:
            self._writer.end()
            deadline = time.monotonic() + PATIENCE
            try:
                while not self.write_back():
                    if time.monotonic() > deadline:
                        _logger.warning(
                            "Another process has not written its part of the newest checkpoint to "
                            "%s; the one before it counts.",
                            self.store,
                        )
                        break
                    time.sleep(PATIENCE / 40)
            except OSError as error:
                raise OSError(
                    f"{str(error).rstrip('.')}; what is not yet there lies in {self.folder}."
                ) from error
        self.abandon()

    def abandon(self) -> None:
        """Gives the lock back and removes the folder, without writing what is left."""
        if self._writer is not None:
            self._writer.end()
        if self._lock is not None:
            self._lock.release()
        shutil.rmtree(self.folder, ignore_errors=True)


def _merge(checkpoint: Path) -> None:
    """Makes each array whole of which several processes wrote parts, each into its own folder.

    Of a damaged item the parts stay as they are, and whoever reads the checkpoint names it.
    """
    item: Any  # Orbax has its own class of paths.
    for item in checkpoint.iterdir():
        if any(item.glob("ocdbt.process_*")) and not (item / "manifest.ocdbt").exists():
            import orbax.checkpoint as ocp

            try:
                ocp.PyTreeCheckpointHandler().finalize(item)
            except Exception as error:  # Whatever a broken file makes the reader raise.
                _logger.warning("The parts of %s cannot be merged: %s", item, error)


@contextmanager
def run_folder(run_dir: str | Path, checkpoints: Which = "all") -> Iterator[Path]:
    """A run's directory, for reading; of one in a bucket, a copy on this machine.

    New small files are written back. Takes no lock: a run may be read while it is trained, and
    every object is whole.

    Raises:
      FileNotFoundError: the bucket holds no run there.
      OSError: the store cannot be asked.
    """
    if scheme_of(run_dir) is None:
        yield Path(run_dir)
        return
    mirror = Mirror(str(run_dir))
    try:
        mirror.fetch(checkpoints)
        if not (mirror.folder / "config.json").exists():
            raise FileNotFoundError(
                f"{mirror.store}/config.json does not exist; {mirror.store} holds no run."
            )
        yield mirror.folder
        mirror.write_files()
    finally:
        mirror.abandon()


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
