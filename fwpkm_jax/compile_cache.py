"""Compiled programs kept on disk, so that a command that runs again compiles nothing."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

VARIABLE = "FWPKM_JAX_CACHE"
"""Environment variable: a folder to use, or `off`."""


def enable_compile_cache() -> Path | None:
    """Turns on JAX's cache of compiled programs for this process; returns its folder.

    The programs `fwpkm train`, `eval` and `generate` call it; importing the library does not. The
    folder is the first of these that is set:

    - what `JAX_COMPILATION_CACHE_DIR` or `jax.config` names: left as it is, thresholds included;
    - `FWPKM_JAX_CACHE`; `off` keeps nothing;
    - `$XDG_CACHE_HOME/fwpkm_jax/compiled`, or `~/.cache/fwpkm_jax/compiled`.

    Programs compiled for one processor may crash on another, so each kind of processor has a folder
    of its own inside: a home directory may be shared. Delete the folder at any time to free its
    space.

    Returns:
      The folder; None if nothing is kept: switched off, or the folder cannot be written to, which a
      warning says.
    """
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen:
        return Path(chosen)
    named = os.environ.get(VARIABLE, "")
    if named.lower() == "off":
        return None
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
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: a run compiles dozens of them, and each costs more than reading it.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


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
