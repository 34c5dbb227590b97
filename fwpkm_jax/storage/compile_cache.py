"""Compiled programs kept on disk or in a bucket, so that the same command compiles once.

A program is a file named by what was compiled (JAX's key). It has what JAX gives, and the SHA-256
of that, and gets its name when it is whole. A damaged one counts as missing, so it is compiled and
written again. In a bucket each is one object. Machines that write the same one at the same time
write programs that may stand for each other, and one of them stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache  # TODO: a public one once JAX takes caches of others.
from jax._src.compilation_cache_interface import CacheInterface

from fwpkm_jax.io.atomic import replacing
from fwpkm_jax.storage.addresses import check_store, scheme_of
from fwpkm_jax.storage.repeated import Repeated
from fwpkm_jax.storage.stores import Store
from fwpkm_jax.storage.sync import FolderCopy

logger = logging.getLogger(__name__)

VARIABLE = "FWPKM_JAX_CACHE"
"""Environment variable: a folder to use, the address of one in a bucket, or `off`."""
EVERY = 10.0
"""Seconds between two looks for programs that a bucket does not have."""
_PROGRAM = re.compile(r"[^/]+-cache")
_DIGEST_BYTES = 32
_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
    "jax_compilation_cache_max_size",
)


@contextlib.contextmanager
def compile_cache() -> Iterator[Path | None]:
    """Makes JAX keep the programs that a command compiles, and find those that are kept.

    Importing the library does not call it. The folder is the first of these that is set:

    - what `JAX_COMPILATION_CACHE_DIR` or `jax.config` names: left as it is, thresholds included;
    - `FWPKM_JAX_CACHE`; `off` keeps nothing. If it is an address, the programs there are copied to
      a folder of this machine before the body; new ones are written back while it runs, and at its
      end. A store that cannot be read or written costs one warning, and the body runs without it;
    - `$XDG_CACHE_HOME/fwpkm_jax/compiled`, or `~/.cache/fwpkm_jax/compiled`.

    Programs compiled for one processor may crash on another, so each kind of processor has a folder
    of its own inside: a home directory may be shared. Delete the folder at any time to free its
    space. A folder of this machine stays in use after the body.

    Yields:
      The folder; None if nothing is kept: switched off, or the folder cannot be written to, which a
      warning says.

    Raises:
      ValueError: the address is of no bucket, or its package is missing.
    """
    chosen, named = jax.config.values["jax_compilation_cache_dir"], os.environ.get(VARIABLE, "")
    if chosen or named.lower() == "off":
        yield Path(chosen) if chosen else None
    elif scheme_of(named) is None:
        folder = _writable(Path(named).expanduser() if named else default_folder())
        if folder is not None:
            _keep_in(folder)
        yield folder
    else:
        check_store(named, VARIABLE)
        with _kept_in_bucket(Store(f"{named.rstrip('/')}/{_processor()}")) as folder:
            yield folder


@contextlib.contextmanager
def _kept_in_bucket(store: Store) -> Iterator[Path | None]:
    with tempfile.TemporaryDirectory(prefix="fwpkm-programs-", ignore_cleanup_errors=True) as place:
        programs = _Programs(store, Path(place))
        if not programs.fetch():
            yield None
            return
        before = {name: jax.config.values[name] for name in _SETTINGS}
        # XLA would get the path of a cache of its own, which is a part of every program's name:
        # no other machine would find it.
        jax.config.update("jax_persistent_cache_enable_xla_caches", None)
        jax.config.update("jax_compilation_cache_max_size", -1)  # It needs files of its own, too.
        _keep_in(Path(place))
        try:
            with Repeated(programs.write_back, EVERY, name="compiled programs"):
                yield Path(place)
        finally:
            programs.write_back()
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


class _Programs:
    """Programs in a bucket, and the folder of this machine that JAX reads and writes."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._copy = FolderCopy(store, folder, holds=_PROGRAM.fullmatch)
        self._lost = False

    def fetch(self) -> bool:
        """Fills the folder; whether the bucket could be read."""
        with self._one_warning("read"):
            self._copy.look()
            self._copy.fetch(missing_ok=True)  # Some may be deleted meanwhile.
        return not self._lost

    def write_back(self) -> None:
        """Writes programs that the bucket does not have, or has damaged."""
        copy = self._copy
        names = [x.name for x in copy.folder.iterdir() if _PROGRAM.fullmatch(x.name)]
        new = copy.changed(names)
        if not new or self._lost:
            return
        with self._one_warning("written"):
            before = copy.there
            copy.look()
            for name in new:
                # Another machine may have been faster.
                if copy.there.get(name) == before.get(name):
                    copy.put(name)

    @contextlib.contextmanager
    def _one_warning(self, what: str) -> Iterator[None]:
        """Turns what a store raises into one warning; it is not asked again."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._lost = True
            logger.warning(
                "Compiled programs cannot be %s in %s, and this command goes on without it: %s "
                "Set %s to another folder, or to off.",
                *(what, self._copy.store, error, VARIABLE),
            )


class _Files(CacheInterface):
    """The files of a folder, as JAX reads and writes programs; its own cache writes in place."""

    def __init__(self, folder: Path) -> None:
        self._path, self._said = folder, False

    def get(self, key: str) -> Any:
        """The bytes of a program; None if there is none, or a damaged one."""
        file = self._path / f"{key}-cache"
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        program, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if hashlib.sha256(program).digest() == digest:
            return program
        if not self._said:
            self._said = True
            logger.warning("%s is damaged; such programs are compiled and written again.", file)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Writes a program in place of a damaged one, too: JAX asks only after it found none."""
        with replacing(self._path / f"{key}-cache") as file:
            file.write(value + hashlib.sha256(value).digest())


def _writable(folder: Path) -> Path | None:
    """This processor's folder in a folder of programs, which is made; None with a warning."""
    folder = folder / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable, reason = os.access(folder, os.W_OK), "Permission denied"
    except OSError as error:
        usable, reason = False, error.strerror
    if usable:
        return folder
    logger.warning(
        "Compiled programs are not kept: %s cannot be written to (%s). Set %s to another "
        "folder, or to off.",
        *(folder, reason, VARIABLE),
    )
    return None


def _keep_in(folder: Path) -> None:
    """Makes JAX keep its programs in a folder."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: a run compiles dozens of them, and each costs more than reading it.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    if jax.config.values["jax_compilation_cache_max_size"] == -1:  # Else JAX deletes old ones.
        compilation_cache._cache, compilation_cache._cache_initialized = _Files(folder), True


def default_folder() -> Path:
    """The user's cache folder for compiled programs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fwpkm_jax" / "compiled"


def _processor() -> str:
    """A name for what this machine's processor can execute."""
    machine = os.uname().machine
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return machine
    can = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return f"{machine}-{hashlib.sha256(''.join(sorted(set(can))).encode()).hexdigest()[:8]}"
