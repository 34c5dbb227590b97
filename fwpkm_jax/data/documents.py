"""Documents of text files, in file order."""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from fwpkm_jax import outside_files
from fwpkm_jax.literals import some

SUFFIXES = (".jsonl", ".txt", ".bin")
"""Kinds of files that `python -m fwpkm_jax.data.prepare jsonl` looks for."""
KINDS = (*SUFFIXES, ".jsonl.gz", ".parquet", ".arrow")
"""Kinds of files that training and evaluation read."""
PACKAGED = "package:"
"""Prefix of paths inside the installed package."""


_LOGGER = logging.getLogger(__name__)


class TextDocument(NamedTuple):
    """A document and its id."""

    id: str
    """The record's `id` if it has one, otherwise file name and line."""
    text: str


def find_files(path: str | Path, *, kinds: Sequence[str] = SUFFIXES) -> list[Path]:
    """The data files of a path: the file itself, or all files below the folder in sorted order.

    Of a folder that `datasets.Dataset.save_to_disk` wrote, the files that its `state.json` names.

    Args:
      path: a file or a folder, whose other files one logged line names;
        `package:sample/train.jsonl` is a file of this package.
      kinds: of files that count.

    Raises:
      FileNotFoundError: `path` does not exist.
      ValueError: it is a file of another kind, a folder without data files, with a hidden one,
        with a text and a tokenised file of the same name, or with several splits of a data set.
    """
    if str(path).startswith(PACKAGED):
        path = Path(__file__).parent / str(path).removeprefix(PACKAGED)
    path = Path(path).expanduser()
    if path.is_dir():
        return _files_below(path, kinds)
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path.absolute()}; check the path.")
    if kind_of(path) not in kinds:
        raise ValueError(f"{path} is not a {', '.join(kinds)} file; rename or convert it.")
    return [path]


def kind_of(path: str | Path) -> str:
    """The end of a file's name in small letters, as `.txt` or `.jsonl.gz`."""
    name = str(path).lower()
    return ".jsonl.gz" if name.endswith(".jsonl.gz") else PurePath(name).suffix


def _files_below(folder: Path, kinds: Sequence[str]) -> list[Path]:
    """The data files of a folder; one logged line says what else it holds and why that is not read.

    Raises:
      ValueError: see `find_files`.
    """
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    if ".arrow" in kinds:
        found = _saved_data_sets(found)
    files = [file for file in found if kind_of(file) in kinds]
    for file in files:
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            raise ValueError(
                f"{file} is hidden, so it is hardly meant to be read; delete it, or name the files "
                f"and folders of {folder} that are."
            )
    present, passed = set(files), [file for file in found if kind_of(file) not in kinds]
    # An index or a manifest belongs to the tokenised file beside it.
    beside = (".idx", ".json")
    others = [
        file
        for file in passed
        if not (kind_of(file) in beside and file.with_suffix(".bin") in present)
    ]
    if others:
        reasons = "; ".join(f"{name} ({why})" for name, why in _reasons(others))
        if not files:
            raise ValueError(
                f"The folder {folder} holds no {', '.join(kinds)} file, only {reasons}; name "
                "another."
            )
        _LOGGER.warning("%s: %d files are read. Passed over: %s.", folder, len(files), reasons)
    if not files:
        raise ValueError(f"The folder {folder} holds no {', '.join(kinds)} file; name another.")
    for text in files:
        if kind_of(text) != ".bin" and (encoded := text.with_suffix(".bin")) in present:
            raise ValueError(
                f"{folder} holds {text} and {encoded}, which reads as the same text twice; "
                "name the files to use, or rename one."
            )
    return files


def _saved_data_sets(found: list[Path]) -> list[Path]:
    """The files without those that describe a data set of `save_to_disk`, and without its caches.

    Raises:
      ValueError: a data set has several splits, or lacks a file that it names.
    """
    dropped: set[Path] = set()
    for splits in (file for file in found if file.name == "dataset_dict.json"):
        names = outside_files.read_json(splits, kind=dict, otherwise=_SAVE).get("splits", [])
        raise ValueError(
            f"{splits.parent} holds the splits {', '.join(map(str, names))} of a data set; name "
            f"the folder of one, as {splits.parent / str((names or ['train'])[0])}."
        )
    for state in (file for file in found if file.name == "state.json"):
        stored = outside_files.read_json(state, kind=dict, otherwise=_SAVE).get("_data_files")
        if stored is None:
            continue
        with outside_files.reading(state, otherwise=_SAVE):
            parts = [state.parent / str(part["filename"]) for part in stored]
        for part in parts:
            if part not in found:
                raise outside_files.OutsideFileError(
                    state, f"names {part.name}, which is not there", otherwise=_SAVE
                )
        beside = {file for file in found if file.parent == state.parent}
        dropped |= {x for x in beside if kind_of(x) in (".arrow", ".json")} - set(parts)
    return [file for file in found if file not in dropped]


_SAVE = "save the data set again"


def _reasons(files: list[Path]) -> list[tuple[str, str]]:
    """Kinds of files that are not read, how many there are or which one, and why."""
    kinds: dict[str, list[Path]] = {}
    for file in files:
        kinds.setdefault(kind_of(file) or "no ending", []).append(file)
    why = {
        **dict.fromkeys((".gz", ".xz", ".zst", ".bz2", ".zip"), "compressed; unpack it"),
        **dict.fromkeys((".parquet", ".arrow", ".jsonl.gz"), "training reads it as it is"),
        ".idx": "its .bin is missing",
    }
    return [
        (
            repr(members[0].name) if len(members) == 1 else f"{len(members)} of {kind}",
            why.get(kind, "no text that is read"),
        )
        for kind, members in sorted(kinds.items())
    ]


def read_documents(path: Path, *, field: str) -> Iterator[TextDocument]:
    """The documents of a `.jsonl` file, one per line, or the one document of a `.txt` file.

    Blank lines and documents without text are left out.

    Args:
      path: a file whose name ends in `.jsonl` or `.txt`, in UTF-8.
      field: name of the text in a `.jsonl` record.

    Raises:
      ValueError: a line is not UTF-8, not JSON or has no such field; the error names it.
    """
    refuse_pointer(path)
    if kind_of(path) == ".txt":
        if text := read_text(path):
            yield TextDocument(path.name, text)
        return
    with path.open("rb") as lines:
        for number, record in read_json_lines(lines, name=str(path)):
            if text := text_field(record, field, place=f"{path}, line {number}"):
                own = record.get("id")
                yield TextDocument(f"{path.name}:{number}" if own in (None, "") else str(own), text)


def refuse_pointer(path: Path) -> None:
    """Raises the error of a git-lfs pointer, which stands for a file that was not fetched."""
    with path.open("rb") as file:
        if outside_files.is_pointer(file.read(100)):
            outside_files.refuse_pointer(path)


def read_text(path: Path) -> str:
    """The exact text of a UTF-8 file.

    Raises:
      ValueError: it is not UTF-8; the error names the place.
    """
    return decode_utf8(path.read_bytes(), name=str(path))


def read_json_lines(
    lines: Iterable[bytes], *, name: str, skip: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, from 1, and records of JSON lines; blank lines are left out.

    Args:
      lines: the lines of a file opened in binary.
      name: name of the file in errors.
      skip: number of lines to skip.

    Raises:
      ValueError: a line is not UTF-8 or no JSON object; the error names it.
    """
    start = 0
    for number, line in enumerate(lines, start=1):
        if number > skip and line.strip():
            yield number, read_json_line(line, name=name, start=start, number=number)
        start += len(line)


def read_json_line(line: bytes, *, name: str, start: int, number: int) -> dict[str, Any]:
    """The record of a line that is not blank.

    Args:
      line: of JSON.
      name: of the file in errors.
      start: bytes of the file before it.
      number: of the line, from 1.

    Raises:
      ValueError: it is not UTF-8 or no JSON object; the error names it.
    """
    content = decode_utf8(line, name=name, start=start, first_line=number)
    return _parse(content, place=f"{name}, line {number}")


def decode_utf8(content: bytes, *, name: str, start: int = 0, first_line: int = 1) -> str:
    """Text of the bytes of file `name` from offset `start` on, which lies in line `first_line`.

    A byte order mark at the start of the file is no part of the text.

    Raises:
      ValueError: they are not UTF-8; the error names the place.
    """
    if start == 0 and content.startswith(codecs.BOM_UTF8):
        start, content = len(codecs.BOM_UTF8), content[len(codecs.BOM_UTF8) :]
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise ValueError(
            f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset "
            f"{start + error.start}, line {line}; convert the file to UTF-8."
        ) from error


def text_field(record: dict[str, Any], field: str, *, place: str) -> str:
    """The text of one field of a record.

    Raises:
      ValueError: there is no such field or it holds no text; the error names `place`.
    """
    if field not in record:
        there = some(list(map(repr, record)), like=repr(field)) or "none"
        raise ValueError(
            f"{place} has no field {field!r}, only {there}; "
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
    return text


def _parse(line: str, *, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error.msg}, column {error.colno}.") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # Numbers with thousands of digits, or thousands of brackets.
        raise ValueError(f"{place} is not the JSON of a document: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} is a {type(record).__name__}, not a JSON object.")
    return record
