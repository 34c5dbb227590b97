"""Rows of fixed length from documents: cut from their concatenation, or fitted whole."""

import bisect
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

Packing = Literal["concat", "documents", "best_fit"]
"""How documents come into rows. concat: rows are cut from the concatenation, and a row is read as
one text. documents: the same rows with segment ids, so that no document sees another. best_fit:
documents are kept whole where they fit, with padding behind them, and segment ids."""


class TokenSegment(Protocol):
    """A run of token ids: an array, or a file that reads its slices when asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, tokens: slice, /) -> np.ndarray: ...


class PackedRows:
    """Random access to the rows of concatenated segments; a short last row is dropped.

    A document may continue in the next row, and a row may hold the end of one document and the
    start of another. Every token before the dropped remainder is in exactly one row.
    """

    def __init__(self, segments: Sequence[TokenSegment], *, length: int, eos_id: int | None = None):
        """Cuts rows of `length + 1` tokens: inputs, and labels shifted by one.

        Args:
          segments: laid end to end.
          length: labels of a row.
          eos_id: the last token of every document, for rows with segment ids; None: without.
        """
        self._segments, self._eos_id = list(segments), eos_id
        self._row = length + 1
        self._ends = np.cumsum([len(segment) for segment in self._segments])

    @property
    def num_tokens(self) -> int:
        """Tokens in all segments, those of the remainder included."""
        return int(self._ends[-1]) if self._segments else 0

    def __len__(self) -> int:
        return self.num_tokens // self._row

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """A row: `tokens` int32 `[length + 1]`, `loss_weight` float32 `[length]` of ones.

        With `eos_id` also `segment_ids` int32 `[length]`, of the inputs, from 1 on; the weight of
        a document's first token as the label of the one before it is then 0.
        """
        start, end = index * self._row, (index + 1) * self._row
        pieces = []
        segment = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            offset = int(self._ends[segment]) - len(self._segments[segment])
            stop = min(end, int(self._ends[segment]))
            pieces.append(self._segments[segment][start - offset : stop - offset])
            start, segment = stop, segment + 1
        return make_row(np.concatenate(pieces), eos_id=self._eos_id)


def make_row(tokens: np.ndarray, *, eos_id: int | None) -> dict[str, np.ndarray]:
    """The row of token ids that were cut from a concatenation; see `PackedRows`."""
    tokens = tokens.astype(np.int32)
    if eos_id is None:
        return {"tokens": tokens, "loss_weight": np.ones(len(tokens) - 1, np.float32)}
    ends = tokens[:-1] == eos_id
    return {
        "tokens": tokens,
        "loss_weight": (~ends).astype(np.float32),
        "segment_ids": (1 + np.cumsum(ends) - ends).astype(np.int32),
    }


class _Piece(NamedTuple):
    """Tokens of one document that stand together in a row."""

    document: int
    start: int
    length: int


class BestFitRows:
    """Random access to rows that hold whole documents, with padding behind them.

    A document longer than a row is cut into rows of its own and a rest; each piece is read as a
    document. Then the pieces, the longest first, each go into the row with the least room that
    still holds them. The result depends on the documents alone.

    References: best-fit decreasing bin packing, as used for language models by Ding et al. 2024,
    arXiv:2404.10830.
    """

    def __init__(self, documents: Sequence[TokenSegment], *, length: int):
        """Fits documents into rows of `length + 1` tokens; those of one token are left out."""
        self._documents, self._row = list(documents), length + 1
        pieces = [
            _Piece(number, start, min(self._row, len(document) - start))
            for number, document in enumerate(self._documents)
            for start in range(0, len(document), self._row)
        ]
        # A single token has no label.
        pieces = sorted((p for p in pieces if p.length > 1), key=lambda p: -p.length)
        self._rows: list[list[_Piece]] = []
        rooms: list[tuple[int, int]] = []  # Room and number of rows that are not full, sorted.
        for piece in pieces:
            place = bisect.bisect_left(rooms, (piece.length, 0))
            if place < len(rooms):
                room, row = rooms.pop(place)
            else:
                room, row = self._row, len(self._rows)
                self._rows.append([])
            self._rows[row].append(piece)
            if room > piece.length:
                bisect.insort(rooms, (room - piece.length, row))

    @property
    def num_tokens(self) -> int:
        """Tokens in all rows, without padding."""
        return sum(piece.length for row in self._rows for piece in row)

    @property
    def padding(self) -> float:
        """Share of the rows' places that hold no token."""
        return 1 - self.num_tokens / max(len(self) * self._row, 1)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """A row as of `PackedRows` with segment ids; tokens, ids and weights of padding are 0."""
        tokens, ids = np.zeros(self._row, np.int32), np.zeros(self._row, np.int32)
        at = 0
        for number, (document, start, length) in enumerate(self._rows[index], start=1):
            tokens[at : at + length] = self._documents[document][start : start + length]
            ids[at : at + length] = number
            at += length
        counts = (ids[:-1] == ids[1:]) & (ids[1:] != 0)
        return {
            "tokens": tokens,
            "loss_weight": counts.astype(np.float32),
            "segment_ids": ids[:-1],
        }
