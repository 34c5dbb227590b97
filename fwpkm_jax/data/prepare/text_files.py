"""Reads JSON lines and plain text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fwpkm_jax.data.documents import find_files, kind_of, read_json_lines, read_text, text_field
from fwpkm_jax.data.prepare.records import Record, Source, select


@dataclass(frozen=True)
class JsonLines:
    """The lines of a `.jsonl` file."""

    path: Path
    name: str
    field: str

    @property
    def files(self) -> dict[str, Path]:
        return {self.name: self.path}

    def count(self) -> int:
        with self.path.open("rb") as lines:
            return sum(1 for _ in lines)

    def read(self, start: int) -> Iterator[Record]:
        with self.path.open("rb") as lines:
            for number, record in read_json_lines(lines, name=str(self.path), skip=start):
                place = f"{self.path}, line {number}"
                text = text_field(record, self.field, place=place)
                yield Record(number, (text,) if text else ())


@dataclass(frozen=True)
class PlainText:
    """The one document of a `.txt` file."""

    path: Path
    name: str

    @property
    def files(self) -> dict[str, Path]:
        return {self.name: self.path}

    def count(self) -> int:
        return 1

    def read(self, start: int) -> Iterator[Record]:
        if start == 0 and (text := read_text(self.path)):
            yield Record(1, (text,))


def text_files(
    path: str | Path, *, field: str = "text", start: int = 0, stop: int | None = None
) -> Source:
    """The documents of `.jsonl` and `.txt` files, in sorted order.

    Args:
      path: a file, or a folder that is searched to the bottom.
      field: of a `.jsonl` record, that holds the text.
      start: first record to read; a record is a line, or a `.txt` file.
      stop: first record after those to read.

    Raises:
      FileNotFoundError: `path` does not exist.
      ValueError: it holds no text, or tokenised files, or no record within the limits.
    """
    path = Path(path).expanduser()
    parts = []
    for file in find_files(path):
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        if kind_of(file) == ".bin":
            raise ValueError(f"{file} is tokenised already; name the texts alone.")
        parts.append(
            JsonLines(file, name, field) if kind_of(file) == ".jsonl" else PlainText(file, name)
        )
    return Source(
        name="jsonl", spans=select(parts, start=start, stop=stop), settings={"field": field}
    )
