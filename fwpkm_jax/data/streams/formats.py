"""Documents of one file from any place on, in pieces that fit into memory.

Whatever a file's kind, its reader gives `Piece`s and can start again at the place of any of them:
a byte of a `.jsonl` or `.txt` file, a row of Parquet or Arrow, an entry and a token of a `.bin`.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from fwpkm_jax.data.json_lines import MOST_TEXT_BYTES, START, Place, read_json_lines, text_field
from fwpkm_jax.data.streams.files import AbstractDataFile, LocalFile
from fwpkm_jax.data.streams.tables import column_texts, pyarrow_module, read_batches
from fwpkm_jax.data.token_files import TokenFile
from fwpkm_jax.data.tokenizers import BYTES, ByteTokenizer, Tokenizer
from fwpkm_jax.io.untrusted import OutsideFileError, reading

_PIECE_BYTES = 2**20
_PIECE_TOKENS = 2**18
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
    together: int = _TOGETHER,
    num_threads: int | None = None,
) -> Iterator[Tokens]:
    """The pieces as tokens.

    Args:
      pieces: of documents, in order.
      together: see `read_tokens`.
      num_threads: of the tokenizer; None: one for each processor.
    """
    eos = np.asarray([tokenizer.eos_id], np.int32)
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
    with file.open_at(start.byte) as content:
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
    with file.open_at(start.byte) as content:
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


def _read_rows(file: AbstractDataFile, field: str, start: Place) -> Iterator[Piece]:
    for first, batch in read_batches(file, [field, "id"], start.record):
        for row, text in column_texts(file, batch, field, first=first, start=start.record):
            own = None
            if "id" in batch.schema.names and field != "id":
                with reading(file.name, place=f"row {row + 1}"):
                    own = batch.column("id")[row - first].as_py()
            yield Piece(Place(row), text, _id(own, file, row))


def count_records(file: AbstractDataFile, *, field: str) -> int:
    """Lines, rows or entries of a file, as places count them."""
    if file.kind == ".parquet":
        parquet = pyarrow_module("pyarrow.parquet")
        with file.open_at(0) as content, reading(file.name):
            return parquet.read_metadata(content).num_rows
    if file.kind == ".arrow":
        return sum(batch.num_rows for _, batch in read_batches(file, [field]))
    if file.kind == ".txt":
        return 1
    if isinstance(file, LocalFile) and file.kind == ".bin":
        return TokenFile(file.path, vocab_size=2**31).num_entries
    with file.open_at(0) as lines, reading(file.name):
        return sum(1 for _ in lines)
