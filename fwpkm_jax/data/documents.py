"""Documents of text files, in file order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".jsonl", ".txt", ".bin")


class TextDocument(NamedTuple):
    """A document as it was read."""

    id: str
    """The record's own `id` where it has one, else file name and line."""
    text: str


def find_files(path: str | Path) -> list[Path]:
    """The data files of a path: itself, or all below it in sorted order.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      ValueError: it is a file of another kind, a folder without data files, or a folder with a
        text and a tokenised file of the same name.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not files:
            raise ValueError(
                f"The folder {path} holds no {', '.join(SUFFIXES)} file; name another."
            )
        present = set(files)
        for text in files:
            if text.suffix != ".bin" and (encoded := text.with_suffix(".bin")) in present:
                raise ValueError(
                    f"{path} holds {text} and {encoded}, which reads as the same text twice; "
                    "name the files to use, or rename one."
                )
        return files
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path.absolute()}; check the path.")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is not a {', '.join(SUFFIXES)} file; rename or convert it.")
    return [path]


def read_documents(path: Path, *, field: str) -> Iterator[TextDocument]:
    """The documents of a `.jsonl` file, one per line, or the one document of a `.txt` file.

    Blank lines and documents without text are left out.

    Args:
      path: a file whose name ends in `.jsonl` or `.txt`, in UTF-8.
      field: name of the text in a `.jsonl` record.

    Raises:
      ValueError: a line is not UTF-8, not JSON or has no such field; the error names it.
    """
    if path.suffix == ".txt":
        if text := _decode(path.read_bytes(), path=path, start=0, first_line=1):
            yield TextDocument(path.name, text)
        return
    start = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                content = _decode(line, path=path, start=start, first_line=number)
                document = _parse(content, field=field, place=f"{path}, line {number}")
                if document.text:
                    yield document._replace(id=document.id or f"{path.name}:{number}")
            start += len(line)


def _decode(content: bytes, *, path: Path, start: int, first_line: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{content[error.start]:02x} at offset "
            f"{start + error.start}, line {line}; convert the file to UTF-8."
        ) from error


def _parse(line: str, *, field: str, place: str) -> TextDocument:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error.msg}, column {error.colno}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} is no JSON object but a {type(record).__name__}.")
    if field not in record:
        raise ValueError(
            f"{place} has no field {field!r}, only {', '.join(map(repr, record)) or 'none'}; "
            "set `field` to the one that holds the text."
        )
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{place}: field {field!r} is a {type(text).__name__}, not a text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: field {field!r} holds half a surrogate pair, \\u{ord(text[error.start]):x}, "
            "which no UTF-8 text can; repair or drop the record."
        ) from error
    return TextDocument(str(record["id"]) if record.get("id") is not None else "", text)
