"""Says whether what a stored line measured is still in the code: a hash of the files it depends on.

A line is kept with the hash and the kind of device; the next call of the suite runs only what has
another hash now, or had another device.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.processes import ROOT

KERNELS, LIBRARY, STEP = "pallas_kernels", "fwpkm_jax", "benchmarks/speed/train_step.py"


@functools.cache
def digest(*paths: str) -> str:
    """A hash of the Python files below these files and folders, named from the repository's root.

    Raises:
      FileNotFoundError: one of them is neither a file nor a folder.
    """
    found = hashlib.sha256()
    for path in sorted(paths):
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{path} is neither a file nor a folder of {ROOT}.")
        files = [ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py")
        for file in sorted(files):
            found.update(f"{file.relative_to(ROOT)}\n".encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def of_case(folders: Sequence[str]) -> str:
    """The hash for a comparison of a kernel: of its folders and of what all kernels share.

    Args:
      folders: names in `pallas_kernels`; none: all of it, and the library.
    """
    if not folders:
        return of_step()
    shared = [f"{KERNELS}/{file.name}" for file in sorted((ROOT / KERNELS).glob("*.py"))]
    return digest(*shared, *(f"{KERNELS}/{folder}" for folder in folders))


def of_step() -> str:
    """The hash for a whole training step: of all kernels and of the library."""
    return digest(KERNELS, LIBRARY, STEP)


def is_measured(row: Mapping[str, Any], source: str, device: str | None) -> bool:
    """Whether a stored line is of this source, and of this kind of device if that is known."""
    return row.get("source") == source and (device is None or row.get("device") == device)
