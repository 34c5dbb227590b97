"""Compiled programs kept on disk or in a bucket, so that the same command compiles once.

A program is a file or an object named by what was compiled (JAX's key). It has what JAX gives, and
the SHA-256 of that, and gets its name when it is whole. A damaged one counts as missing, so it is
compiled and written again. Machines that write the same one at the same time write programs that
may stand for each other, and one of them stays.
"""

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache  # TODO: a public one once JAX takes caches of others.
from jax._src.compilation_cache_interface import CacheInterface

from fwpkm_jax.io.atomic import replacing
from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.storage.addresses import check_store, scheme_of
from fwpkm_jax.storage.stores import Store

logger = logging.getLogger(__name__)

VARIABLE = "FWPKM_JAX_CACHE"
"""Environment variable: a folder to use, the address of one in a bucket, or `off`."""
_DIGEST_BYTES = 32
_MOST_BYTES = 2**31


def use_compile_cache() -> Path | Store | None:
    """Makes JAX keep the programs that this process compiles, and find those that are kept.

    Importing the library does not call it. The folder is the first of these that is set:

    - what `JAX_COMPILATION_CACHE_DIR` or `jax.config` names: left as it is, thresholds included;
    - `FWPKM_JAX_CACHE`, a folder or the address of one in a bucket; `off` keeps nothing;
    - `$XDG_CACHE_HOME/fwpkm_jax/compiled`, or `~/.cache/fwpkm_jax/compiled`.

    Programs compiled for one processor may crash on another, so each kind of processor has a folder
    of its own inside: a home directory may be shared. Delete the folder at any time to free its
    space. If it cannot be read or written, one warning says so, and programs are compiled.

    Returns:
      The folder; None if nothing is kept.

    Raises:
      ValueError: the address is of no bucket, or its package is missing.
    """
    chosen, named = jax.config.values["jax_compilation_cache_dir"], os.environ.get(VARIABLE, "")
    if chosen or named.lower() == "off":
        return Path(chosen) if chosen else None
    if scheme_of(named) is None:
        folder = Path(named).expanduser() if named else default_folder()
        place: Path | Store = folder / _processor()
        with contextlib.suppress(OSError):  # Said once it is read or written.
            place.mkdir(parents=True, exist_ok=True)
    else:
        check_store(named, VARIABLE)
        place = Store(f"{named.rstrip('/')}/{_processor()}")
        # XLA would get the path of a cache of its own, which is a part of every program's name: no
        # other machine would find it. The size is bounded by means of files, too.
        jax.config.update("jax_persistent_cache_enable_xla_caches", None)
        jax.config.update("jax_compilation_cache_max_size", -1)
    # JAX makes a path of it, and knows no `memory://`; a store is asked by `_Programs` alone.
    jax.config.update("jax_compilation_cache_dir", str(place).replace("://", "/"))
    # Small programs too: a run compiles dozens of them, and each costs more than reading it.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    if jax.config.values["jax_compilation_cache_max_size"] == -1:  # Else JAX deletes old ones.
        compilation_cache._cache, compilation_cache._cache_initialized = _Programs(place), True
    return place


class _Programs(CacheInterface):
    """Programs as JAX reads and writes them; its own cache writes files in place."""

    def __init__(self, place: Path | Store) -> None:
        self._path: Any = place
        self._lost = self._said = False

    def get(self, key: str) -> Any:
        """The bytes of a program; None if there is none, or a damaged one."""
        name = f"{key}-cache"
        if self._lost:
            return None
        try:
            if isinstance(self._path, Store):
                content = self._path.read(name, most=_MOST_BYTES)
            else:
                content = (self._path / name).read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, OutsideFileError) as error:
            self._go_on_without("read", error)
            return None
        program, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if hashlib.sha256(program).digest() == digest:
            return program
        if not self._said:
            self._said = True
            logger.warning(
                "%s/%s is damaged; such programs are compiled and written again.", self._path, name
            )
        return None

    def put(self, key: str, value: bytes) -> None:
        """Writes a program in place of a damaged one, too: JAX asks only after it found none."""
        name, content = f"{key}-cache", value + hashlib.sha256(value).digest()
        if self._lost:
            return
        try:
            if isinstance(self._path, Store):
                self._path.write(name, content)
                return
            with replacing(self._path / name) as file:
                file.write(content)
        except OSError as error:
            self._go_on_without("written", error)

    def _go_on_without(self, what: str, error: Exception) -> None:
        """Says it once; the folder is not asked again."""
        self._lost = True
        logger.warning(
            "Compiled programs cannot be %s in %s, and this command goes on without it: %s "
            "Set %s to another folder, or to off.",
            *(what, self._path, error, VARIABLE),
        )


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
