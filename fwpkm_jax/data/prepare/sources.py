"""What is written down: parts in order, whose documents can be read from any place on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fwpkm_jax.data.json_lines import Place
from fwpkm_jax.data.streams.files import AbstractDataFile, HubFile, data_files
from fwpkm_jax.data.streams.formats import Piece, count_records, read_pieces
from fwpkm_jax.data.tokenizers import Tokenizer


class Part(Protocol):
    """A part of a source."""

    @property
    def name(self) -> str:
        """Names the part among those of its source."""
        ...

    @property
    def files(self) -> Mapping[str, AbstractDataFile]:
        """The files it is read from, by the name the manifest gives them."""
        ...

    def count(self) -> int:
        """Number of its records; counting them may mean reading the part."""
        ...

    def read(self, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
        """Its documents from a place on, in pieces of which each has a place of its own."""
        ...


@dataclass(frozen=True)
class FilePart:
    """A file of a kind that training reads."""

    file: AbstractDataFile
    name: str
    field: str = "text"

    @property
    def files(self) -> dict[str, AbstractDataFile]:
        return {self.name: self.file}

    def count(self) -> int:
        return count_records(self.file, field=self.field)

    def read(self, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
        return read_pieces(self.file, tokenizer, field=self.field, start=start)


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

    def describe(self) -> dict[str, Any]:
        """Name, settings and parts as JSON values."""
        spans = [[span.part.name, span.start, span.stop] for span in self.spans]
        return {"source": self.name, **self.settings, "parts": spans}


def file_parts(path: str | Path, *, field: str = "text") -> list[FilePart]:
    """The files of a path or an address, named as below it; see `data_files`."""
    root = str(path).partition("://")[2] or str(Path(path).expanduser())

    def name_of(file: AbstractDataFile) -> str:
        if isinstance(file, HubFile):
            return file.path
        return file.name.partition(f"{root.rstrip('/')}/")[2] or file.short_name

    return [FilePart(file, name_of(file), field) for file in data_files(path)]


def text_files(
    path: str | Path, *, field: str = "text", start: int = 0, stop: int | None = None
) -> Source:
    """The documents of any files that training reads, in the order of sorted files.

    Args:
      path: see `data_files`.
      field: of a record, that holds the text.
      start: first record to read; a record is a line, a row, an entry or a `.txt` file. Below 0,
        it and `stop` count from the end.
      stop: first record after those to read.

    Raises:
      FileNotFoundError: there is no such path.
      ValueError: it holds no text, or no record within the limits.
    """
    spans = select(file_parts(path, field=field), start=start, stop=stop)
    return Source(name="text", spans=spans, settings={"field": field})


def select(parts: Sequence[Part], *, start: int = 0, stop: int | None = None) -> tuple[Span, ...]:
    """The records from `start` up to `stop`, numbered over all parts, by part.

    Where `start` is below 0, both count from the end. Parts are counted only where the limits need
    it.

    Raises:
      ValueError: the limits are out of order, or leave no record.
    """
    if stop is not None and stop <= start:
        raise ValueError(f"start={start} and stop={stop} leave no record; give start < stop.")
    if start == 0 and stop is None:
        return tuple(Span(part) for part in parts)
    if start < 0:
        number = sum(part.count() for part in parts)
        if number + start < 0:
            raise ValueError(f"The parts hold {number} records, and {-start} are to be the last.")
        start, stop = number + start, None if stop is None else number + stop
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
