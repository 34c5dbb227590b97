"""Records of JSON lines, and their texts."""

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from fwpkm_jax.io.untrusted import OutsideFileError, parse_json, reading
from fwpkm_jax.literals import some

MOST_TEXT_BYTES = 2**26
"""Of a line of JSON, and of a text that is encoded as a whole."""


class Place(NamedTuple):
    """Where reading a file can start."""

    record: int = 0
    """Lines, rows or entries before it."""
    byte: int = 0
    """Bytes before it, or tokens of the entry; 0 where the kind counts records alone."""


START = Place()


def read_json_lines(
    lines: IO[bytes], *, name: str, start: Place = START
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The records of JSON lines with their places; blank lines are left out.

    Raises:
      OutsideFileError: a line is no JSON object in UTF-8, or has more than `MOST_TEXT_BYTES`; or
        the file ends too early. The error names file and line.
    """
    number, byte = start
    while True:
        place = f"line {number + 1}"
        with reading(name, place=place):
            line = lines.readline(MOST_TEXT_BYTES + 1)
        if not line:
            return
        if len(line) > MOST_TEXT_BYTES:
            problem = f"has more than {MOST_TEXT_BYTES:,} bytes"
            raise OutsideFileError(name, problem, place, "write each document to a line of its own")
        if line.strip():
            way_out = "repair or drop the line"
            record = parse_json(line, name, place=place, otherwise=way_out, kind=dict)
            yield Place(number, byte), record
        number, byte = number + 1, byte + len(line)


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
    return text
