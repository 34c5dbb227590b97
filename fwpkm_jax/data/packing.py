"""Cuts the concatenation of documents into rows of fixed length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np


class TokenSegment(Protocol):
    """A run of token ids: an array, or a file that reads its slices when asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, tokens: slice, /) -> np.ndarray: ...


class PackedRows:
    """Random access to the rows of concatenated segments; a short last row is dropped.

    A document may continue in the next row, and a row may hold the end of one document and the
    start of another. Every token before the dropped remainder is in exactly one row.
    """

    def __init__(self, segments: Sequence[TokenSegment], *, length: int):
        """Cuts rows of `length + 1` tokens: inputs, and labels shifted by one."""
        self._segments = list(segments)
        self._row = length + 1
        self._ends = np.cumsum([len(segment) for segment in self._segments])

    @property
    def num_tokens(self) -> int:
        """Tokens in all segments, those of the remainder included."""
        return int(self._ends[-1]) if self._segments else 0

    def __len__(self) -> int:
        return self.num_tokens // self._row

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """A row: `tokens` int32 `[length + 1]`, `loss_weight` float32 `[length]` of ones."""
        start, end = index * self._row, (index + 1) * self._row
        pieces = []
        segment = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            offset = int(self._ends[segment]) - len(self._segments[segment])
            stop = min(end, int(self._ends[segment]))
            pieces.append(self._segments[segment][start - offset : stop - offset])
            start, segment = stop, segment + 1
        return {
            "tokens": np.concatenate(pieces).astype(np.int32),
            "loss_weight": np.ones(self._row - 1, np.float32),
        }


def cut_rows(documents: Iterable[np.ndarray], *, row_length: int) -> Iterator[np.ndarray]:
    """Consecutive rows of `row_length` tokens of all documents; a short last row is dropped.

    For writing: reads one document at a time. The paper's files hold rows of 4097 tokens.
    """
    rest = np.zeros(0, np.int32)
    for document in documents:
        tokens = np.concatenate([rest, document])
        whole = len(tokens) // row_length * row_length
        yield from tokens[:whole].reshape(-1, row_length)
        rest = tokens[whole:]
