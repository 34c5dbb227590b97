"""Documents of one file from any place on, in pieces that fit into memory.

Whatever a file's kind, its reader gives `Piece`s and can start again at the place of any of them:
a byte of a `.jsonl` or `.txt` file, a row of Parquet or Arrow, an entry and a token of a `.bin`.
"""

from __future__ import annotations

import gzip
import importlib
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple, cast

import numpy as np

from fwpkm_jax.data.documents import read_json_line, text_field
from fwpkm_jax.data.streams.files import AbstractDataFile, LocalFile
from fwpkm_jax.data.token_files import TokenFile
from fwpkm_jax.data.tokenizers import BYTES, Tokenizer
from fwpkm_jax.literals import some
from fwpkm_jax.outside_files import OutsideFileError, is_pointer, reading, refuse_pointer

MOST_RECORD_BYTES = 2**28
"""Of a line of JSON. The whole line is in memory, several times while it is parsed."""
MOST_TEXT_BYTES = 2**26
"""Of a `.txt` file that a tokenizer of pieces of words reads; its text is encoded as a whole."""
_PIECE_BYTES = 2**20
_PIECE_TOKENS = 2**18
_ROWS = 64
# Texts that are encoded together: the library's threads share them.
_TOGETHER, _TOGETHER_CHARACTERS = 64, 2**20


class Place(NamedTuple):
    """Where reading a file can start."""

    record: int = 0
    """Lines, rows or entries before it."""
    byte: int = 0
    """Bytes before it, or tokens of the entry; 0 where the kind counts records alone."""


START = Place()


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    place: Place
    """Reading from here gives this piece again."""
    content: str | np.ndarray
    """Text, or token ids of a tokenised file."""
    id: str
    """The record's `id` if it has one, otherwise file name and number."""
    ends: bool = True
    """Whether the document ends here; a text is then followed by the token that says so."""


class Tokens(NamedTuple):
    """A piece as the model reads it."""

    place: Place
    tokens: np.ndarray
    """int32 `[tokens]`, with the end of document where it ends here."""
    id: str
    ends: bool
    """Whether the document, or the entry of a tokenised file, ends here."""


def read_tokens(
    file: AbstractDataFile,
    tokenizer: Tokenizer,
    *,
    field: str,
    start: Place = START,
    together: int = _TOGETHER,
) -> Iterator[Tokens]:
    """The tokens of a file's documents from a place on; blank documents are left out.

    Args:
      file: of any kind in `documents.KINDS`.
      tokenizer: encodes the text; its vocabulary is that of a tokenised file.
      field: of the record that holds the text.
      start: of one of the pieces, from an earlier reading.
      together: most documents that are read and encoded at a time.

    Raises:
      ValueError: the file cannot be read as its kind; the error names file and place.
      ImportError: a package that reads this kind is not installed.
    """
    eos = np.asarray([tokenizer.eos_id], np.int32)
    for pieces in _together(read_pieces(file, tokenizer, field=field, start=start), together):
        texts = [piece.content for piece in pieces if isinstance(piece.content, str)]
        encoded = iter(tokenizer.encode_batch(texts, num_threads=os.cpu_count() or 1))
        for piece in pieces:
            if not isinstance(piece.content, str):
                yield Tokens(piece.place, piece.content.astype(np.int32), piece.id, piece.ends)
                continue
            tokens = next(encoded)
            if piece.ends:
                tokens = np.concatenate([tokens, eos])
            yield Tokens(piece.place, tokens, piece.id, piece.ends)


def _together(pieces: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    """Consecutive pieces: a few, or one that is long."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.content)
        if len(group) == most or size >= _TOGETHER_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_pieces(
    file: AbstractDataFile, tokenizer: Tokenizer, *, field: str, start: Place = START
) -> Iterator[Piece]:
    """The pieces of a file from a place on; see `read_tokens`."""
    if file.kind == ".bin":
        return _read_entries(file, tokenizer, start)
    if file.kind == ".txt":
        return _read_text(file, tokenizer, start)
    if file.kind in (".jsonl", ".jsonl.gz"):
        return _read_json_lines(file, field, start)
    return _read_rows(file, field, start)


def _read_entries(file: AbstractDataFile, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
    if not isinstance(file, LocalFile):
        raise OutsideFileError(
            file.name,
            "is a tokenised file, which is read at random places",
            otherwise="copy it and its .idx to this machine",
        )
    entries = TokenFile(file.path, vocab_size=tokenizer.vocab_size)
    for number in range(start.record, entries.num_entries):
        first = start.byte if number == start.record else 0
        for token in range(first, entries.entry_length(number), _PIECE_TOKENS):
            tokens = entries.entry(number, slice(token, token + _PIECE_TOKENS))
            ends = token + _PIECE_TOKENS >= entries.entry_length(number)
            yield Piece(Place(number, token), tokens, f"{file.short_name}:{number + 1}", ends)


def _read_text(file: AbstractDataFile, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
    """The one document of a `.txt` file; for a tokenizer of bytes, in pieces."""
    by_bytes = tokenizer.fingerprint == BYTES
    if not by_bytes and file.size > MOST_TEXT_BYTES:
        raise OutsideFileError(
            file.name,
            f"is one text of {file.size:,} bytes, and this tokenizer encodes texts of up to "
            f"{MOST_TEXT_BYTES:,}",
            otherwise="write its documents to a .jsonl file, one per line",
        )
    with _open(file, start.byte) as content:
        at, begun, line = start.byte, start.byte > 0, None if start.byte else 1
        while block := content.read(_PIECE_BYTES if by_bytes else MOST_TEXT_BYTES + 1):
            if at == 0 and is_pointer(block):
                refuse_pointer(file.name)
            last = len(block) < _PIECE_BYTES or not by_bytes
            text, used = _decode(block, file.name, at, last=last, line=line)
            content.seek(at + used)
            if text:
                begun = True
                yield Piece(Place(0, at), text, file.short_name, ends=False)
            at += used
            line = None if line is None else line + text.count("\n")
        if begun:
            yield Piece(Place(0, at), "", file.short_name)


def _decode(block: bytes, name: str, at: int, *, last: bool, line: int | None) -> tuple[str, int]:
    """The text of a block from byte `at` of a file on, and how many of its bytes are in it.

    `line` is the line that the block begins in; None: unknown, because reading began in the file.
    """
    bom = 3 if at == 0 and block.startswith(b"\xef\xbb\xbf") else 0
    try:
        return block[bom:].decode(), len(block)
    except UnicodeDecodeError as error:
        cut = bom + error.start
        if not last and error.reason == "unexpected end of data" and len(block) - cut < 4 <= cut:
            return block[bom:cut].decode(), cut
        place = "" if line is None else f", line {line + block[:cut].count(10)}"
        raise OutsideFileError(
            name,
            f"is not UTF-8: byte 0x{block[cut]:02x} at offset {at + cut}{place}",
            otherwise="convert the file to UTF-8",
        ) from error


def _read_json_lines(file: AbstractDataFile, field: str, start: Place) -> Iterator[Piece]:
    with _open(file, start.byte) as content:
        at = start.byte
        for record in itertools.count(start.record):
            place = f"line {record + 1}"
            with reading(file.name, place=place):
                line = content.readline(MOST_RECORD_BYTES + 1)
            if not line:
                return
            if len(line) > MOST_RECORD_BYTES:
                problem = f"has more than {MOST_RECORD_BYTES:,} bytes"
                way_out = "write each document to a line of its own"
                raise OutsideFileError(file.name, problem, place, way_out)
            if at == 0 and is_pointer(line):
                refuse_pointer(file.name)
            if line.strip():
                values = read_json_line(line, name=file.name, start=at, number=record + 1)
                if text := text_field(values, field, place=f"{file.name}, {place}"):
                    yield Piece(Place(record, at), text, _id(values.get("id"), file, record))
            at += len(line)


def _id(own: object, file: AbstractDataFile, record: int) -> str:
    return f"{file.short_name}:{record + 1}" if own in (None, "") else str(own)


def _open(file: AbstractDataFile, byte: int) -> IO[bytes]:
    """The content from a byte on; of a compressed file, a byte of what it holds."""
    with reading(file.name):
        content = file.open()
        if file.kind.endswith(".gz"):
            content = cast(IO[bytes], _Gzip(content))
        content.seek(byte)
    return content


class _Gzip(gzip.GzipFile):
    """A compressed file that closes what it reads from."""

    def __init__(self, content: IO[bytes]):
        super().__init__(fileobj=content, mode="rb")
        self._content = content

    def close(self) -> None:
        super().close()
        self._content.close()


def _read_rows(file: AbstractDataFile, field: str, start: Place) -> Iterator[Piece]:
    """The rows of a Parquet or Arrow file."""
    batches = _read_parquet if file.kind == ".parquet" else _read_arrow
    with reading(file.name):
        content = file.open()
    with content:
        for first, batch in _parsed(batches(content, field, start.record), file.name):
            skip = max(start.record - first, 0)
            with reading(file.name, place=f"row {first + 1}"):
                texts = batch.column(field).slice(skip).to_pylist()
            ids: list[Any] = [None] * len(texts)
            if "id" in batch.schema.names:
                ids = batch.column("id").slice(skip).to_pylist()
            for record, (text, own) in enumerate(zip(texts, ids, strict=True), start=first + skip):
                if not isinstance(text, str | None):
                    problem = f"has a field {field!r} of type {batch.schema.field(field).type}"
                    raise OutsideFileError(
                        file.name, problem, otherwise="set `field` to one that holds texts"
                    )
                if text:
                    yield Piece(Place(record), text, _id(own, file, record))


def _parsed(batches: Iterator[tuple[int, Any]], name: str) -> Iterator[tuple[int, Any]]:
    """The batches; whatever the parser raises is an error of the file."""
    while True:
        with reading(name):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _read_parquet(content: IO[bytes], field: str, start: int) -> Iterator[tuple[int, Any]]:
    """Batches of rows and the number of each one's first; row groups before `start` are skipped."""
    parquet = pyarrow_module("pyarrow.parquet")
    # With a buffer a column is read piece by piece: row groups may be larger than memory.
    with parquet.ParquetFile(content, buffer_size=_PIECE_BYTES) as file:
        columns = _columns(file.schema_arrow.names, field)
        first = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if start < first + rows:
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
                    if start < first + batch.num_rows:
                        yield first, batch
                    first += batch.num_rows
            else:
                first += rows


def _read_arrow(content: IO[bytes], field: str, start: int) -> Iterator[tuple[int, Any]]:
    """As `_read_parquet`, of Arrow's stream format (as of `save_to_disk`) or its file format."""
    ipc = pyarrow_module("pyarrow").ipc
    begin = content.read(len(_ARROW_FILE))
    content.seek(0)
    first = 0
    if begin == _ARROW_FILE:
        with ipc.open_file(content) as file:
            columns = _columns(file.schema.names, field)
            for number in range(file.num_record_batches):
                yield from _small(file.get_batch(number), columns, first, start)
                first += file.get_batch(number).num_rows
        return
    with ipc.open_stream(content) as file:
        columns = _columns(file.schema.names, field)
        for batch in file:
            yield from _small(batch, columns, first, start)
            first += batch.num_rows


_ARROW_FILE = b"ARROW1"


def _small(batch: Any, columns: list[str], first: int, start: int) -> Iterator[tuple[int, Any]]:
    """Some rows of a batch at a time, those from `start` on."""
    batch = batch.select(columns)
    batch.validate(full=True)  # Arrow takes offsets from the file as they are.
    for at in range(0, batch.num_rows, _ROWS):
        if start < first + min(at + _ROWS, batch.num_rows):
            yield first + at, batch.slice(at, _ROWS)


def _columns(names: list[str], field: str) -> list[str]:
    """The columns to read. Raises ValueError if there is no such field."""
    if field not in names:
        there = some([repr(name) for name in names], like=repr(field)) or "none"
        raise ValueError(
            f"it has no field {field!r}, only {there}; set `field` to the one that holds the text"
        )
    return [field, *(["id"] if "id" in names and field != "id" else [])]


def pyarrow_module(name: str) -> Any:
    """A module of pyarrow, which only some installations have.

    Raises:
      ImportError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            "Parquet and Arrow files are read with pyarrow, which is not installed; run: "
            "pip install -e '.[data]' in a checkout of fwpkm_jax"
        ) from error
