"""Text columns of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fwpkm_jax.data.prepare.records import Record
from fwpkm_jax.data.streams.formats import pyarrow_module
from fwpkm_jax.literals import some

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_BATCH_ROWS = 256
_DOMAIN = "meta.pile_set_name"


@dataclass(frozen=True)
class ParquetText:
    """The rows of a Parquet file, or those of one domain."""

    path: Path
    name: str
    field: str = "text"
    domain: str | None = None
    """Only rows whose `meta.pile_set_name` is this; None: all."""

    @property
    def files(self) -> dict[str, Path]:
        return {self.name: self.path}

    def count(self) -> int:
        with self._open() as file:
            return file.metadata.num_rows

    def read(self, start: int) -> Iterator[Record]:
        with self._open() as file:
            first = 0
            for group in range(file.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                if start < end and self._holds_domain(file, group):
                    yield from self._read_group(file, group, first=first, start=start)
                first = end

    def _read_group(
        self, file: ParquetFile, group: int, *, first: int, start: int
    ) -> Iterator[Record]:
        columns = [self.field] if self.domain is None else [self.field, _DOMAIN]
        position = first
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
            if position + batch.num_rows > start:
                texts = batch.column(self.field).to_pylist()
                domains = [None] * len(texts) if self.domain is None else _domains(batch)
                for number, (text, domain) in enumerate(
                    zip(texts, domains, strict=True), start=position + 1
                ):
                    if number > start and domain == self.domain:
                        yield Record(number, (text,) if text else ())
            position += batch.num_rows

    def _holds_domain(self, file: ParquetFile, group: int) -> bool:
        """Reads only the column of names of row groups that lack the domain."""
        return self.domain is None or self.domain in _domains(
            file.read_row_group(group, columns=[_DOMAIN])
        )

    def _open(self) -> ParquetFile:
        parquet = pyarrow_module("pyarrow.parquet")
        try:
            file = parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:  # pyarrow raises one of these.
            raise ValueError(
                f"{self.path} is no whole Parquet file ({error}); download it again."
            ) from error
        columns = [file.schema.column(index).path for index in range(len(file.schema))]
        for name in (self.field, *([] if self.domain is None else [_DOMAIN])):
            if name not in columns:
                file.close()
                raise ValueError(
                    f"{self.path} has no column {name!r}, only {some(columns, like=name)}; it is "
                    "of another data set."
                )
        return file


def parquet_parts(
    path: Path, *, wanted: str, field: str = "text", domain: str | None = None
) -> list[ParquetText]:
    """The Parquet files of a path: the file itself, or all below the folder in sorted order.

    Args:
      path: a file or folder.
      wanted: what the error message asks to download.
      field: column that holds the text.
      domain: chooses rows; see `ParquetText`.

    Raises:
      FileNotFoundError: there are none.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file() or files[0].suffix != ".parquet":
        raise FileNotFoundError(
            f"{path.absolute()} is neither a Parquet file nor a folder that holds any; download "
            f"{wanted} (docs/howto/data.md)."
        )
    root = path if path.is_dir() else path.parent
    return [ParquetText(file, file.relative_to(root).as_posix(), field, domain) for file in files]


def _domains(table: Any) -> list[str | None]:
    """`meta.pile_set_name` of each row of a pyarrow batch or table."""
    return [meta and meta["pile_set_name"] for meta in table.column("meta").to_pylist()]
