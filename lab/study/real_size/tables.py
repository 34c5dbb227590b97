"""The table of lab/archive/real_size.md: a row for each claim, a column for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lab.findings.stored import markdown, resampled
from lab.study.real_size.evaluation import Score

Line = dict[str, Any]


def table(lines: Sequence[Line]) -> str:
    """Every claim in every run that has lines of it; intervals are over books or haystacks."""
    runs: list[list[Line]] = []
    for line in lines:
        if line["part"] == "about":
            runs.append([])
        runs[-1].append(line)
    columns = [_Run(run) for run in runs]
    rows = []
    for title, cell in _ROWS.items():
        cells = [cell(run) for run in columns]
        if any(cells):
            rows.append([title, *cells])
    return markdown(["", *(run.name for run in columns)], rows)


class _Run:
    """The lines of one run."""

    def __init__(self, lines: Sequence[Line]):
        self.lines, self.about = lines, lines[0]
        self.name = f"{self.about['size']}, {self.about['device']}, seed {self.about['seed']}"

    def find(self, part: str, **asked: Any) -> list[Line]:
        asked["part"] = part
        return [x for x in self.lines if all(x.get(name) == asked[name] for name in asked)]

    def by_book(self, variant: str, way: str) -> np.ndarray:
        """Loss of each book by section, NaN where it has none; no rows if there is no line."""
        for line in self.find("text", variant=variant, way=way):
            return np.array(line["nats"], float)
        return np.zeros((0, 1))


def _shown(values: np.ndarray, form: str) -> str:
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return ""
    return format(resampled(values), form)


def _trained(run: _Run) -> str:
    done = [line for line in run.find("train") if "step" in line]
    return f"{max(line['step'] for line in done):,}" if done else ""


def _time(run: _Run) -> str:
    found = {}
    for line in run.find("train"):
        if "variant" in line:
            found.setdefault(line["variant"], []).append(line["ms"])
    return ", ".join(f"{name} {np.median(ms):.4g}" for name, ms in found.items())


def _loss(variant: str, way: str, section: int) -> Callable[[_Run], str]:
    return lambda run: _shown(run.by_book(variant, way)[:, section], ".3f")


def _difference(one: tuple[str, str], two: tuple[str, str], section: int) -> Callable[[_Run], str]:
    """Of the same books in a section."""

    def cell(run: _Run) -> str:
        a, b = run.by_book(*one), run.by_book(*two)
        if not (len(a) and len(b)):
            return ""
        return _shown(a[:, section] - b[:, section], "+.4f")

    return cell


def _needles(
    score: str, variant: str, way: str, *, longest: bool = False, **asked: Any
) -> Callable[[_Run], str]:
    """A score of the shortest or the longest haystacks that were read."""

    def cell(run: _Run) -> str:
        found = run.find("needles", variant=variant, way=way, **asked)
        if not found:
            return ""
        line = (max if longest else min)(found, key=lambda line: line["bytes"])
        values = np.array(line["by_haystack"])[:, Score._fields.index(score)]
        behind = f" after {line['bytes'] // 1024} kB" if longest else ""
        return _shown(values, ".2f") + behind

    return cell


def _gates(*kinds: str) -> Callable[[_Run], str]:
    """Mean gate over the layers at bytes of the kinds, one after the other."""

    def cell(run: _Run) -> str:
        for line in run.find("gates", variant="fwpkm"):
            found = np.array(line["by_book"], float)  # [books, layers, kinds]
            at = dict(zip(line["kinds"], np.moveaxis(found, 2, 0), strict=True))
            of_kinds = [at[kind][np.isfinite(at[kind])] for kind in kinds]
            return ", ".join(f"{gates.mean():.2f}" for gates in of_kinds if len(gates))
        return ""

    return cell


_OUT: dict[str, Any] = {"words": "held out"}
_ROWS: dict[str, Callable[[_Run], str]] = {
    "steps of each variant": _trained,
    "ms per step": _time,
    "backbone's loss, first two rows": _loss("backbone", "rows", 0),
    "backbone's loss, from row nine": _loss("backbone", "rows", -1),
    "FwPKM minus backbone, first two rows": _difference(
        ("fwpkm", "written"), ("backbone", "rows"), 0
    ),
    "FwPKM minus backbone, from row nine": _difference(
        ("fwpkm", "written"), ("backbone", "rows"), -1
    ),
    "FwPKM minus backbone that carries its state, from row nine": _difference(
        ("fwpkm", "written"), ("backbone", "carried"), -1
    ),
    "FwPKM frozen minus backbone, from row nine": _difference(
        ("fwpkm", "frozen"), ("backbone", "rows"), -1
    ),
    "FwPKM written minus frozen, from row nine": _difference(
        ("fwpkm", "written"), ("fwpkm", "frozen"), -1
    ),
    "FwPKM written minus no reads, from row nine": _difference(
        ("fwpkm", "written"), ("fwpkm", "no reads"), -1
    ),
    "PKM minus backbone, from row nine": _difference(("pkm", "rows"), ("backbone", "rows"), -1),
    "both minus PKM, from row nine": _difference(("both", "written"), ("pkm", "rows"), -1),
    "first digit, one row, FwPKM": _needles("first", "fwpkm", "written", reading=1, **_OUT),
    "the same, read four times": _needles("first", "fwpkm", "written", reading=4, **_OUT),
    "the same, frozen": _needles("first", "fwpkm", "frozen", reading=1, **_OUT),
    "the same, backbone": _needles("first", "backbone", "rows", reading=1, **_OUT),
    "the same, backbone that carries its state": _needles(
        "first", "backbone", "carried", reading=1, **_OUT
    ),
    "first digit, trained words, FwPKM": _needles(
        "first", "fwpkm", "written", reading=1, words="trained"
    ),
    "first digit, asked in other words, FwPKM": _needles(
        "first", "fwpkm", "written", reading=1, words="held out, asked otherwise"
    ),
    "digits given those before, FwPKM": _needles("digits", "fwpkm", "written", reading=1, **_OUT),
    "nats of the number, FwPKM": _needles("nats", "fwpkm", "written", reading=1, **_OUT),
    "nats of the number, frozen": _needles("nats", "fwpkm", "frozen", reading=1, **_OUT),
    "exact match, FwPKM": _needles("exact", "fwpkm", "written", reading=1, **_OUT),
    "first digit, longest text, FwPKM": _needles(
        "first", "fwpkm", "written", reading=1, longest=True, **_OUT
    ),
    "longest text, read four times": _needles(
        "first", "fwpkm", "written", reading=4, longest=True, **_OUT
    ),
    "longest text, backbone that carries its state": _needles(
        "first", "backbone", "carried", reading=1, longest=True, **_OUT
    ),
    "first digit in the stating row, backbone": _needles(
        "first", "backbone", "rows", reading=0, **_OUT
    ),
    "first digit in the stating row, FwPKM": _needles(
        "first", "fwpkm", "written", reading=0, **_OUT
    ),
    "gates at bytes seen below 10 and 1,000 times or more": _gates("below 10", "1000 and more"),
    "gates at letters, digits, others": _gates("letters", "digits", "others"),
}
