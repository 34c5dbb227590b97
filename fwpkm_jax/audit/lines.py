"""A line of an audit: what was checked, the verdict, and the numbers behind it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from fwpkm_jax.literals import Checked

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
class Line(Checked):
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


def shown(lines: Iterable[Line], show: Callable[[Line], None]) -> list[Line]:
    """The lines, after `show` was called with each when it was ready."""
    found = []
    for line in lines:
        show(line)
        found.append(line)
    return found


def refused(section: Section, name: str, why: object) -> Line:
    """The line of a check that could not be made."""
    return Line(section=section, name=name, verdict="skipped", text=f"Refused: {why}")


def named_arrays(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a pytree by the names of their places; "result" for an array alone."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(place, simple=True, separator="/") or "result": np.asarray(leaf)
        for place, leaf in leaves
    }


def differences(actual: Any, expected: Any, *, rounding: float = 0.0) -> dict[str, float]:
    """By name the arrays of two pytrees that differ, with the largest difference of each.

    What differs by at most `rounding` times the spread of the expected array is left out.
    """
    ours, theirs = named_arrays(actual), named_arrays(expected)
    if ours.keys() != theirs.keys():
        return {"structure": float("inf")}
    found = {name: difference_of(ours[name], theirs[name]) for name in ours}
    spreads = {name: float(np.std(theirs[name])) if rounding else 0.0 for name in found}
    return {name: gap for name, gap in found.items() if not gap <= rounding * spreads[name]}


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
