"""Columns of Parquet and Arrow files, a few rows at a time, in bounded memory."""

from collections.abc import Callable, Iterator, Sequence
from struct import unpack_from
from typing import IO, Any

from fwpkm_jax.data.json_lines import MOST_TEXT_BYTES
from fwpkm_jax.data.streams.files import AbstractDataFile
from fwpkm_jax.io.untrusted import OutsideFileError, reading
from fwpkm_jax.lazy_imports import import_extra
from fwpkm_jax.literals import some

_MOST_DECODED_BYTES = 2**29
"""Of a batch of Arrow, and of a column of a row group of Parquet that is packed very tightly."""
_MOST_PACKED = 100
"""Times that a large column may be larger than what it is stored in."""
_BUFFER = 2**20
_ROWS = 64
_ARROW_FILE = b"ARROW1\0\0"


def column_texts(
    file: AbstractDataFile, batch: Any, field: str, *, first: int, start: int
) -> Iterator[tuple[int, str]]:
    """The texts in a column of a batch that are not blank, with the numbers of their rows.

    Args:
      first: number of the batch's first row.
      start: of the first row to read.

    Raises:
      OutsideFileError: a row holds no text, or one of more than `MOST_TEXT_BYTES`.
    """
    column = batch.column(field)
    places, values = range(batch.num_rows), column
    if hasattr(column, "dictionary"):
        places, values = column.indices.to_pylist(), column.dictionary
    # One after the other, because each may be long.
    for row in range(max(first, start), first + batch.num_rows):
        place = f"row {row + 1}"
        with reading(file.name, place=place):
            at = places[row - first]
            text = None if at is None else values[at].as_py()
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
    with file.open_at(0) as content:
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
        content, metadata=metadata, buffer_size=_BUFFER, read_dictionary=columns[:1]
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


def pyarrow_module(name: str) -> Any:
    """A module of pyarrow, which only some installations have."""
    return import_extra(name, "Parquet and Arrow files are read", extra="data")
