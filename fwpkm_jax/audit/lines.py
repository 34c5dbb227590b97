"""A line of an audit: what was checked, the verdict, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from fwpkm_jax.literals import check_literals

Section = Literal["causality", "indices", "origin", "isolation", "stability"]
SECTIONS: dict[Section, str] = {
    "causality": "Nothing sees a later token",
    "indices": "Losses and accuracies read the right position",
    "origin": "Where an answer comes from",
    "isolation": "Users stay apart, and what was forgotten is gone",
    "stability": "Writing stays stable",
}
"""The parts of an audit in order, and their headings."""

Verdict = Literal["pass", "fail", "skipped"]
"""pass and fail: of a check. skipped: the text says why."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of an audit."""

    section: Section
    """The part it belongs to."""
    name: str
    """What was checked, unique in its part."""
    verdict: Verdict
    """See `Verdict`."""
    text: str
    """What was found, a sentence; of a failure its cause."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""

    def __post_init__(self) -> None:
        check_literals(self)


def judged(good: bool) -> Verdict:
    """The verdict of a check."""
    return "pass" if good else "fail"


def failures(lines: Iterable[Line]) -> list[Line]:
    """The lines that failed."""
    return [line for line in lines if line.verdict == "fail"]


def attempt(section: Section, name: str, check: Callable[[], Line]) -> Line:
    """The line of a check; of one that the subject refuses, a line that says so.

    `NotImplementedError` and `ValueError` are refusals, such as of rows with several documents; a
    text may also be missing.
    """
    try:
        return check()
    except (NotImplementedError, ValueError, FileNotFoundError) as error:
        return refused(section, name, error)


def refused(section: Section, name: str, why: object) -> Line:
    """The line of a check that could not be made."""
    return Line(section=section, name=name, verdict="skipped", text=f"Refused: {why}")


class Difference(NamedTuple):
    """How two results of the same structure differ.

    Attributes:
      same: whether all arrays are equal; NaN equals NaN.
      largest: largest absolute difference; infinite where shapes or structures differ.
      where: path of the first array that differs; empty if none does.
    """

    same: bool
    largest: float
    where: str


def compare(actual: Any, expected: Any, *, rounding: float = 0.0) -> Difference:
    """How two pytrees of arrays differ by more than `rounding` times the spread of each array."""
    ours, structure = jax.tree_util.tree_flatten_with_path(actual)
    theirs, other = jax.tree_util.tree_flatten_with_path(expected)
    if structure != other:
        return Difference(False, float("inf"), "structure")
    largest, where = 0.0, ""
    for (path, x), (_, y) in zip(ours, theirs, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes():
            continue
        gap = difference_of(x, y)
        if rounding and gap <= rounding * float(np.std(y)):
            continue
        where = where or jax.tree_util.keystr(path, simple=True, separator="/") or "result"
        largest = max(largest, gap)
    return Difference(not where, largest, where)


def difference_of(x: np.ndarray, y: np.ndarray) -> float:
    """The largest absolute difference of two arrays; infinite where only one is finite."""
    return float(gaps(x, y, axes=0)) if x.shape == y.shape else float("inf")


def gaps(x: np.ndarray, y: np.ndarray, *, axes: int) -> np.ndarray:
    """The largest absolute difference along all but the first axes of two arrays of one shape.

    NaN equals NaN; where only one value is finite the difference is infinite.
    """
    kept = x.shape[:axes]
    if x.tobytes() == y.tobytes():
        return np.zeros(kept)
    if x.dtype.kind != "f":
        x, y = x.astype(np.float64), y.astype(np.float64)
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    found = np.abs(np.where(equal, 0, x) - np.where(equal, 0, y)).reshape(*kept, -1)
    return np.max(np.where(np.isnan(found), np.inf, found), axis=-1, initial=0.0)
