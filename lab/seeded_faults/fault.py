"""One fault, and where it lies."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

SOURCE = ("fwpkm_jax", "pallas_kernels")
"""Folders that faults are seeded in."""


class Fault(NamedTuple):
    """A change of a few characters that makes the source wrong.

    Attributes:
      name: what is wrong, unique among all faults; results are kept by it.
      before: the snippet, which occurs exactly once below `under`.
      after: what replaces it.
      tests: arguments of pytest, the tests that one would run first after a change there.
      under: a file or folder that the snippet lies in; empty: anywhere in the source.
    """

    name: str
    before: str
    after: str
    tests: tuple[str, ...]
    under: str = ""


def find(fault: Fault, tree: Path) -> Path:
    """The file of `tree` that the fault is seeded in.

    Raises:
      ValueError: the snippet occurs nowhere, or more than once.
    """
    sources = _sources(tree)
    found = {
        path: text.count(fault.before)
        for path, text in sources.items()
        if path.is_relative_to(tree / fault.under) and fault.before in text
    }
    if sum(found.values()) != 1:
        where = {str(path.relative_to(tree)): count for path, count in found.items()}
        raise ValueError(
            f"{fault.name!r}: its snippet {fault.before!r} occurs {sum(found.values())} times "
            f"{where or ''}; write one that occurs once."
        )
    return next(iter(found))


@functools.cache
def _sources(tree: Path) -> dict[Path, str]:
    return {
        path: path.read_text()
        for folder in SOURCE
        for path in sorted((tree / folder).rglob("*.py"))
    }
