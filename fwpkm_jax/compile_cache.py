"""Compiled programs kept on disk or in a bucket, so that the same command compiles once.

In a bucket, each program is one object, named by what was compiled (JAX's key). A store writes an
object at once: half a program is never read. Machines that write the same one at the same time
write programs that may stand for each other, and the last of them stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from jax._src import compilation_cache  # TODO: `jax.experimental` once it can decompress.

from fwpkm_jax.addresses import check_store, scheme_of
from fwpkm_jax.stores import Store
from fwpkm_jax.whole_files import check_local

logger = logging.getLogger(__name__)

VARIABLE = "FWPKM_JAX_CACHE"
"""Environment variable: a folder to use, the address of one in a bucket, or `off`."""
EVERY = 10.0
"""Seconds between two looks for programs that a bucket does not have."""
_AT_ONCE = 8
_PROGRAM = re.compile(r"[^/]+-cache")
_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
    "jax_compilation_cache_max_size",
)


@contextlib.contextmanager
def compile_cache() -> Iterator[Path | None]:
    """Keeps the programs that a command compiles, as `enable_compile_cache`, and also in a bucket.

    If `FWPKM_JAX_CACHE` is an address, the programs there are copied to a folder of this machine
    before the body. New ones are written back while it runs, and at its end. A store that cannot be
    read or written costs one warning, and the body runs without it.

    Yields:
      The folder; None if nothing is kept.

    Raises:
      ValueError: the address is of no bucket, or its package is missing.
    """
    address = os.environ.get(VARIABLE, "")
    if scheme_of(address) is None or jax.config.values["jax_compilation_cache_dir"]:
        yield enable_compile_cache()
        return
    check_store(address, VARIABLE)
    store = Store(f"{address.rstrip('/')}/{_processor()}")
    with tempfile.TemporaryDirectory(prefix="fwpkm-programs-", ignore_cleanup_errors=True) as place:
        programs = _Programs(store, Path(place))
        if not programs.fetch():
            yield None
            return
        before = {name: jax.config.values[name] for name in _SETTINGS}
        _keep_in(Path(place))
        # XLA would get the path of a cache of its own, which is a part of every program's name:
        # no other machine would find it.
        jax.config.update("jax_persistent_cache_enable_xla_caches", None)
        jax.config.update("jax_compilation_cache_max_size", -1)  # It needs files of its own, too.
        compilation_cache.reset_cache()
        programs.begin()
        try:
            yield Path(place)
        finally:
            programs.end()
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


class _Programs:
    """Programs in a bucket, and the folder of this machine that JAX reads and writes."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._there: set[str] = set()
        self._ended = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._work, name="compiled programs", daemon=True)

    def fetch(self) -> bool:
        """Fills the folder; whether the bucket could be read."""

        def download(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):  # Deleted meanwhile.
                self._store.download(name, self._folder / name)

        with self._one_warning("read"):
            self._there = set(filter(_PROGRAM.fullmatch, self._store.sizes()))
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(download, self._there))
        return not self._lost

    def begin(self) -> None:
        """Starts to write back."""
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(EVERY):
            self._write_back()

    def end(self) -> None:
        """Writes back what is left."""
        self._ended.set()
        self._thread.join()
        self._write_back()

    def _write_back(self) -> None:
        names = [x.name for x in self._folder.iterdir() if _PROGRAM.fullmatch(x.name)]
        new = [name for name in names if name not in self._there]
        if not new or self._lost:
            return
        with self._one_warning("written"):
            self._there |= self._store.sizes().keys()  # Another machine may have been faster.
            for name in new:
                content = (self._folder / name).read_bytes()
                if name not in self._there and _is_whole(content):
                    self._store.write(name, content)
                    self._there.add(name)

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
                *(what, self._store, error, VARIABLE),
            )


def _is_whole(program: bytes) -> bool:
    """Whether JAX has written all of a program; it writes a file in its place."""
    try:
        compilation_cache.decompress_executable(program)
    except Exception:  # Each of JAX's compressors has its own.
        return False
    return True


def enable_compile_cache() -> Path | None:
    """Turns on JAX's cache of compiled programs for this process; returns its folder.

    Importing the library does not call it. The folder is the first of these that is set:

    - what `JAX_COMPILATION_CACHE_DIR` or `jax.config` names: left as it is, thresholds included;
    - `FWPKM_JAX_CACHE`; `off` keeps nothing, and `compile_cache` takes the address of a bucket;
    - `$XDG_CACHE_HOME/fwpkm_jax/compiled`, or `~/.cache/fwpkm_jax/compiled`.

    Programs compiled for one processor may crash on another, so each kind of processor has a folder
    of its own inside: a home directory may be shared. Delete the folder at any time to free its
    space.

    Returns:
      The folder; None if nothing is kept: switched off, or the folder cannot be written to, which a
      warning says.

    Raises:
      ValueError: `FWPKM_JAX_CACHE` is an address.
    """
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen:
        return Path(chosen)
    named = os.environ.get(VARIABLE, "")
    if named.lower() == "off":
        return None
    check_local(named, VARIABLE)
    folder = (Path(named).expanduser() if named else default_folder()) / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
        reason = "Permission denied"
    except OSError as error:
        usable, reason = False, error.strerror
    if not usable:
        logger.warning(
            "Compiled programs are not kept: %s cannot be written to (%s). Set %s to another "
            "folder, or to off.",
            *(folder, reason, VARIABLE),
        )
        return None
    _keep_in(folder)
    return folder


def _keep_in(folder: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: a run compiles dozens of them, and each costs more than reading it.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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
