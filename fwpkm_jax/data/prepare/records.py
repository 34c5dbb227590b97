"""The interface of a source: parts in order, each with numbered records of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Record(NamedTuple):
    """One line, row or novel of a part."""

    position: int
    """Number of records of the part read so far, this one included; reading can continue here."""
    texts: tuple[str, ...]
    """Its documents; none where the record is blank or left out."""


class Part(Protocol):
    """A part of a source that can be read from any record on."""

    @property
    def name(self) -> str:
        """Names the part among those of its source."""
        ...

    @property
    def files(self) -> Mapping[str, Path]:
        """The files it is read from, by the name the manifest gives them."""
        ...

    def count(self) -> int:
        """Number of its records; counting them may mean reading the part."""
        ...

    def read(self, start: int) -> Iterator[Record]:
        """Its records from number `start`, counted from 0, on. Blank ones may be left out."""
        ...


class Span(NamedTuple):
    """The records of a part to read: from `start` up to, not including, `stop`."""

    part: Part
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Everything that determines a sequence of documents."""

    name: str
    spans: tuple[Span, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    """How the parts were read, for the manifest, as JSON values."""
    append_eos: bool = True
    """Whether each document is followed by the tokenizer's end of document."""

    def describe(self) -> dict[str, Any]:
        """Name, settings and parts as JSON values."""
        spans = [[span.part.name, span.start, span.stop] for span in self.spans]
        return {"source": self.name, **self.settings, "append_eos": self.append_eos, "parts": spans}


def select(parts: Sequence[Part], *, start: int = 0, stop: int | None = None) -> tuple[Span, ...]:
    """The records from `start` up to `stop`, numbered over all parts, by part.

    Parts are counted only where the limits need it.

    Raises:
      ValueError: the limits are out of order, or leave no record.
    """
    if start < 0 or (stop is not None and stop <= start):
        raise ValueError(f"start={start} and stop={stop} leave no record; give 0 <= start < stop.")
    if start == 0 and stop is None:
        return tuple(Span(part) for part in parts)
    spans, first = [], 0
    for part in parts:
        if stop is not None and stop <= first:
            break
        end = first + part.count()
        if start < end:
            last = None if stop is None or end <= stop else stop - first
            spans.append(Span(part, max(0, start - first), last))
        first = end
    if not spans:
        raise ValueError(f"The parts hold {first} records, none from number {start} on.")
    return tuple(spans)
