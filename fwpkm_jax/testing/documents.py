"""Rows of several documents, and the same documents one in each row."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

Documents = Sequence[Sequence[tuple[int, int]]]
"""First tokens and ends of each row's documents, in order."""


def random_documents(
    rng: np.random.Generator, length: int, *, number: int
) -> list[tuple[int, int]]:
    """At most `number` documents that fill a row; of three or more one has one token."""
    inner = rng.choice(np.arange(1, length), size=number - 1, replace=False)
    if number > 2:
        inner[1] = inner[0] + 1 if inner[0] + 1 < length else inner[0] - 1
    return list(itertools.pairwise(sorted({0, *map(int, inner), length})))


def starts_of(rows: Documents, length: int, *, padding: bool = False) -> np.ndarray:
    """True at first tokens; with `padding` also behind each end, where padding may begin."""
    starts = np.zeros((len(rows), length + 1), bool)
    for row, documents in enumerate(rows):
        for first, end in documents:
            starts[row, first] = True
            starts[row, end] |= padding
    return starts[:, :length]


def places_apart(
    rows: Documents, length: int, *, most: int, real: np.ndarray | None = None
) -> np.ndarray:
    """Where each document's tokens stand among those of all rows, `[rows * most, length]`; then -1.

    Args:
      rows: at most `most` documents each.
      most: rows that the documents of a row get.
      real: `[rows, length]`, False at padding, which is left out; None: all tokens are real.
    """
    places = np.full((len(rows) * most, length), -1)
    for row, documents in enumerate(rows):
        for number, (first, end) in enumerate(documents):
            tokens = np.arange(first, end)
            tokens = tokens if real is None else tokens[real[row, tokens]]
            places[row * most + number, : len(tokens)] = row * length + tokens
    return places


def apart(x: Any, places: np.ndarray) -> np.ndarray:
    """Rows `[rows, length, ...]` with one document in each row, zeros behind it."""
    moved = np.asarray(x).reshape(-1, *x.shape[2:])[places]
    return np.where((places >= 0).reshape(*places.shape, *[1] * (moved.ndim - 2)), moved, 0)


def together(x: Any, places: np.ndarray, rows: int) -> np.ndarray:
    """Undoes `apart`; zeros where no document is."""
    used = places >= 0
    whole = np.zeros((rows * places.shape[1], *x.shape[2:]), x.dtype)
    whole[places[used]] = np.asarray(x)[used]
    return whole.reshape(rows, -1, *x.shape[2:])
