"""The lines that programs stored, and their means with 95 % intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

ROOT = Path(__file__).parents[2]
RESULTS = ("lab/results", "lab/archive/results", "benchmarks/results")
FOLDERS = tuple(ROOT / name for name in RESULTS)


Line = dict[str, Any]
Values = Sequence[float] | np.ndarray


def path_of(name: str, folders: Sequence[Path] = FOLDERS) -> Path:
    """The file of results of that name, in the first of the folders that has it.

    Raises:
      FileNotFoundError: none has it.
    """
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(f"{name} is in none of {', '.join(map(str, folders))}.")


@cache
def lines_of(name: str) -> list[Line]:
    """The objects of a file with one object of JSON in each line."""
    return [json.loads(line) for line in path_of(name).read_text(encoding="utf-8").splitlines()]


@cache
def document_of(name: str) -> dict[str, Any]:
    """The object of a file of JSON."""
    return json.loads(path_of(name).read_text(encoding="utf-8"))


class Estimate(NamedTuple):
    """A mean and the bounds of its 95 % interval, which a single value does not have (NaN)."""

    mean: float
    low: float
    high: float

    def clipped(self, low: float, high: float) -> Estimate:
        """With bounds that a share, for example, cannot pass."""
        if np.isnan(self.low):
            return self
        return Estimate(self.mean, max(low, self.low), min(high, self.high))

    def __format__(self, form: str) -> str:
        mean, low, high = (format(x, form) for x in self)
        return mean if np.isnan(self.low) else f"{mean} [{low}, {high}]"


def over_seeds(values: Values) -> Estimate:
    """The mean over seeds, with Student's t over them."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, np.nan, np.nan)
    half = _t(len(values) - 1) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return Estimate(mean, mean - half, mean + half)


def share_over_seeds(values: Values) -> Estimate:
    """As `over_seeds`, of shares: the interval ends at 0 and 1."""
    return over_seeds(values).clipped(0.0, 1.0)


def over_books_and_seeds(values: np.ndarray) -> Estimate:
    """The mean over trainings and books, with an interval for others of both.

    The variance of the mean is that of the means of books plus that of the means of trainings, less
    what both contain of the rest. The interval is never narrower than that over books alone or that
    over trainings alone: with three trainings Satterthwaite's freedom can exceed the two that the
    trainings have, and what varies over both cannot be known better than over one of them.

    Args:
      values: `[trainings, books]`.

    References: Owen 2007, "The pigeonhole bootstrap", the naive estimate of variance; degrees of
      freedom by Satterthwaite 1946.
    """
    trainings, books = values.shape
    of_books, of_trainings = values.mean(axis=0), values.mean(axis=1)
    mean = float(values.mean())
    each = (
        (of_books.var(ddof=1) / books, books - 1),
        (of_trainings.var(ddof=1) / trainings, trainings - 1),
    )
    rest = values - of_books - of_trainings[:, None] + mean
    shared = float((rest**2).sum()) / ((trainings - 1) * (books - 1)) / values.size
    variance = each[0][0] + each[1][0] - shared
    halves = [_t(count) * float(one) ** 0.5 for one, count in each]
    if variance > max(one for one, _ in each):
        freedom = variance**2 / sum(one**2 / count for one, count in each)
        halves.append(_t(freedom) * float(variance) ** 0.5)
    half = max(halves)
    return Estimate(mean, mean - half, mean + half)


def resampled(values: np.ndarray) -> Estimate:
    """The mean of values that were drawn independently, with its bootstrap interval."""
    chosen = np.random.default_rng(0).integers(len(values), size=(4000, len(values)))
    low, high = np.quantile(values[chosen].mean(axis=1), [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high))


def _t(freedom: float) -> float:
    return float(stdtrit(freedom, 0.975))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def numbers(count: float) -> str:
    """With commas between thousands."""
    return f"{count:,.0f}"
