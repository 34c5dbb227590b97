"""Documents of one file from any place on, in pieces that fit into memory.

Whatever a file's kind, its reader gives `Piece`s and can start again at the place of any of them:
a byte of a `.jsonl` or `.txt` file, a row of Parquet or Arrow, an entry and a token of a `.bin`.
"""

from __future__ import annotations

import gzip
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from struct import unpack_from
from typing import IO, Any, NamedTuple, cast

import numpy as np

from fwpkm_jax.data.documents import MOST_TEXT_BYTES, START, Place, read_json_lines, text_field
from fwpkm_jax.data.streams.files import AbstractDataFile, LocalFile
from fwpkm_jax.data.token_files import TokenFile
from fwpkm_jax.data.tokenizers import BYTES, ByteTokenizer, Tokenizer
from fwpkm_jax.literals import some
from fwpkm_jax.outside_files import OutsideFileError, is_pointer, reading, refuse_pointer

_MOST_DECODED_BYTES = 2**29
"""Of a batch of Arrow, and of a column of a row group of Parquet that is packed very tightly."""
_MOST_PACKED = 100
"""Times that a large column may be larger than what it is stored in."""
_PIECE_BYTES = 2**20
_PIECE_TOKENS = 2**18
_ROWS = 64
# Texts that are encoded together: the library's threads share them.
_TOGETHER, _TOGETHER_CHARACTERS = 64, 2**20


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
    characters: int
    """Of its text; 0 in a tokenised file."""


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
      file: of any kind in `names.KINDS`.
      tokenizer: encodes the text; its vocabulary is that of a tokenised file.
      field: of the record that holds the text.
      start: of one of the pieces, from an earlier reading.
      together: most documents that are read and encoded at a time.

    Raises:
      ValueError: the file cannot be read as its kind; the error names file and place.
      ImportError: a package that reads this kind is not installed.
    """
    pieces = read_pieces(file, tokenizer, field=field, start=start)
    return encoded(pieces, tokenizer, together=together)


def encoded(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    *,
    append_eos: bool = True,
    together: int = _TOGETHER,
    num_threads: int | None = None,
) -> Iterator[Tokens]:
    """The pieces as tokens.

    Args:
      pieces: of documents, in order.
      tokenizer: encodes them.
      append_eos: whether the end of document follows each text.
      together: see `read_tokens`.
      num_threads: of the tokenizer; None: one for each processor.
    """
    eos = np.asarray([tokenizer.eos_id] if append_eos else [], np.int32)
    threads = num_threads or os.cpu_count() or 1
    for group in _together(pieces, together):
        texts = [piece.content for piece in group if isinstance(piece.content, str)]
        found = iter(tokenizer.encode_batch(texts, num_threads=threads))
        for place, content, name, ends in group:
            if not isinstance(content, str):
                yield Tokens(place, content.astype(np.int32), name, ends, 0)
                continue
            tokens = next(found)
            if ends:
                tokens = np.concatenate([tokens, eos])
            yield Tokens(place, tokens, name, ends, len(content))


def whole_documents(pieces: Iterable[Tokens]) -> Iterator[Tokens]:
    """The documents, each in one piece, at the place of its first."""
    parts: list[Tokens] = []
    for piece in pieces:
        parts.append(piece)
        if piece.ends:
            if len(parts) > 1:
                tokens = np.concatenate([part.tokens for part in parts])
                characters = sum(part.characters for part in parts)
                piece = Tokens(parts[0].place, tokens, piece.id, True, characters)
            yield piece
            parts = []


def read_text(path: Path) -> str:
    """The exact text of a file in UTF-8, as training reads a `.txt` file."""
    file = LocalFile(str(path), path)
    pieces = _read_text(file, ByteTokenizer(), START)
    return "".join(cast(str, piece.content) for piece in pieces)


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
        # Of the first line of a range only the number is known.
        begin = start if start.byte else START
        for place, record in read_json_lines(content, name=file.name, start=begin):
            if place.record < start.record:
                continue
            line = f"{file.name}, line {place.record + 1}"
            if text := text_field(record, field, place=line):
                yield Piece(place, text, _id(record.get("id"), file, place.record))


def _id(own: object, file: AbstractDataFile, record: int) -> str:
    return f"{file.short_name}:{record + 1}" if own in (None, "") else str(own)


def _open(file: AbstractDataFile, byte: int) -> IO[bytes]:
    """The content from a byte on; of a compressed file, a byte of what it holds."""
    with reading(file.name):
        content = file.open()
        if is_pointer(content.read(100)):
            content.close()
            refuse_pointer(file.name)
        content.seek(0)
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
    for first, batch in read_batches(file, [field, "id"], start.record):
        for row, text in column_texts(file, batch, field, first=first, start=start.record):
            own = None
            if "id" in batch.schema.names and field != "id":
                with reading(file.name, place=f"row {row + 1}"):
                    own = batch.column("id")[row - first].as_py()
            yield Piece(Place(row), text, _id(own, file, row))


def column_texts(
    file: AbstractDataFile, batch: Any, field: str, *, first: int, start: int
) -> Iterator[tuple[int, str]]:
    """The texts in a column of a batch that are not blank, with the numbers of their rows.

    Args:
      file: that the batch is of.
      batch: of rows.
      field: the column's name.
      first: number of the batch's first row.
      start: of the first row to read.

    Raises:
      OutsideFileError: a row holds no text, or one of more than `MOST_TEXT_BYTES`.
    """
    column = batch.column(field)
    # One after the other, because each may be long.
    for row in range(max(first, start), first + batch.num_rows):
        place = f"row {row + 1}"
        with reading(file.name, place=place):
            text = column[row - first].as_py()
        if not isinstance(text, str | None):
            problem = f"has a field {field!r} of type {batch.schema.field(field).type}"
            raise OutsideFileError(
                file.name, problem, otherwise="set `field` to one that holds texts"
            )
        if text and len(text) > MOST_TEXT_BYTES:
            problem = (
                f"has a text of {len(text):,} characters, and at most {MOST_TEXT_BYTES:,} are read"
            )
            raise OutsideFileError(file.name, problem, place, "write it as several")
        if text:
            yield row, text


def read_batches(
    file: AbstractDataFile,
    columns: Sequence[str],
    start: int = 0,
    *,
    wanted: Callable[[Any, int], bool] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Batches of a few rows of a Parquet or Arrow file, and the number of the first row of each.

    Args:
      file: of one of these kinds.
      columns: the first must be there; the others are read where they are.
      start: batches that end before this row are left out.
      wanted: whether a row group of a `pyarrow.parquet.ParquetFile` is read; None: all are.

    Raises:
      OutsideFileError: the file is damaged, lacks the column, or holds much more than its size.
    """
    parquet, ipc = pyarrow_module("pyarrow.parquet"), pyarrow_module("pyarrow.ipc")
    with _open(file, 0) as content:
        if file.kind == ".parquet":
            batches = _parquet_batches(parquet, content, columns, start, wanted)
        else:
            batches = _arrow_batches(ipc, content, columns)
        while True:  # Whatever the parser raises is an error of the file.
            with reading(file.name):
                found = next(batches, None)
            if found is None:
                return
            first, batch = found
            for at in range(first, first + batch.num_rows, _ROWS):
                if start < min(at + _ROWS, first + batch.num_rows):
                    yield at, batch.slice(at - first, _ROWS)


def _parquet_batches(
    parquet: Any,
    content: IO[bytes],
    columns: Sequence[str],
    start: int,
    wanted: Callable[[Any, int], bool] | None,
) -> Iterator[tuple[int, Any]]:
    metadata = parquet.read_metadata(content)
    columns = _columns(metadata.schema.to_arrow_schema().names, columns)
    # With a buffer a column is read piece by piece: row groups may be larger than memory. As a
    # dictionary a value that many rows share is in memory once.
    with parquet.ParquetFile(
        content, metadata=metadata, buffer_size=_PIECE_BYTES, read_dictionary=columns[:1]
    ) as file:
        first = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            end = first + group.num_rows
            if start < end and (wanted is None or wanted(file, number)):
                _check_group(group, columns)
                for batch in file.iter_batches(_ROWS, row_groups=[number], columns=columns):
                    yield first, batch
                    first += batch.num_rows
            first = end


def _check_group(group: Any, columns: Sequence[str]) -> None:
    """Raises ValueError where a column of a row group unpacks to much more than its size."""
    for number in range(group.num_columns):
        column = group.column(number)
        size, packed = column.total_uncompressed_size, column.total_compressed_size
        if column.path_in_schema not in columns or size <= _MOST_DECODED_BYTES:
            continue
        if size > _MOST_PACKED * packed:
            raise ValueError(
                f"a row group has {packed:,} bytes of the column {column.path_in_schema!r} and "
                f"says that they unpack to {size:,}"
            )


def _arrow_batches(
    ipc: Any, content: IO[bytes], columns: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    """Of Arrow's stream format (as of `save_to_disk`), or of its file format, which holds one."""
    begin = content.read(len(_ARROW_FILE))
    content.seek(len(_ARROW_FILE) if begin == _ARROW_FILE else 0)
    first, schema = 0, None
    for message in ipc.MessageReader.open_stream(content):
        if schema is None:
            schema = ipc.read_schema(message)
            columns = _columns(schema.names, columns)
            continue
        if message.type != "record batch":
            raise ValueError(f"it has a {message.type}, and columns of plain values are read")
        if (size := _decoded_bytes(message)) > _MOST_DECODED_BYTES:
            raise ValueError(f"a batch of rows unpacks to {size:,} bytes; save it in smaller ones")
        batch = ipc.read_record_batch(message, schema).select(columns)
        batch.validate(full=True)  # Arrow takes offsets from the file as they are.
        yield first, batch
        first += batch.num_rows
    if schema is None:
        raise ValueError("it is empty")


_ARROW_FILE = b"ARROW1\0\0"


def _decoded_bytes(message: Any) -> int:
    """Bytes of a record batch's buffers once they are unpacked, from the message's FlatBuffers.

    References: github.com/apache/arrow, format/Message.fbs.
    """
    content, body = message.metadata, message.body

    def follow(at: int) -> int:
        return at + unpack_from("<I", content, at)[0]

    def field(table: int, number: int) -> int:
        """Where a field of a table is; 0 if it is not there."""
        vtable = table - unpack_from("<i", content, table)[0]
        size = unpack_from("<H", content, vtable)[0]
        offset = 4 + 2 * number
        found = unpack_from("<H", content, vtable + offset)[0] if offset < size else 0
        return table + found if found else 0

    batch = follow(field(follow(0), 2))
    buffers, packed, size = follow(field(batch, 2)), field(batch, 3), 0
    for number in range(unpack_from("<I", content, buffers)[0]):
        at, length = unpack_from("<qq", content, buffers + 4 + 16 * number)
        size += unpack_from("<q", body, at)[0] if packed and length else length
    return size


def _columns(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Those that are there of the columns; ValueError if the first is not."""
    field, *others = wanted
    if field not in names:
        there = some([repr(name) for name in names], like=repr(field)) or "none"
        raise ValueError(
            f"it has no field {field!r}, only {there}; set `field` to the one that holds the text"
        )
    return [field, *(x for x in others if x.partition(".")[0] in names and x != field)]


def count_records(file: AbstractDataFile, *, field: str) -> int:
    """Lines, rows or entries of a file, as places count them."""
    if file.kind == ".parquet":
        parquet = pyarrow_module("pyarrow.parquet")
        with _open(file, 0) as content, reading(file.name):
            return parquet.read_metadata(content).num_rows
    if file.kind == ".arrow":
        return sum(batch.num_rows for _, batch in read_batches(file, [field]))
    if file.kind == ".txt":
        return 1
    if isinstance(file, LocalFile) and file.kind == ".bin":
        return TokenFile(file.path, vocab_size=2**31).num_entries
    with _open(file, 0) as lines, reading(file.name):
        return sum(1 for _ in lines)


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
