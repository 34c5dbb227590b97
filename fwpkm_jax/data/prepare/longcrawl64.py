"""LongCrawl64: documents of 65,536 GPT-2 tokens, decoded to be tokenised anew.

It comes as Zarr arrays (format 2) `[documents, 65536]` of uint16 in chunks of 2048 x 2048, or as
flat files of uint16 in which an end of text follows each document.

References: Buckman 2024, manifestai.com/articles/longcrawl64.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fwpkm_jax.data.prepare.gpt2 import EOS_ID, Gpt2Decoder
from fwpkm_jax.data.prepare.records import Part, Record, Source, select

WANTED = (
    "train.zarr or heldout.zarr of huggingface.co/datasets/clankur/longcrawl64 with the file "
    ".zarray and all chunks of the rows you want"
)

_WINDOW = 2**22  # Tokens of a flat file looked at together.


@dataclass(frozen=True)
class ZarrRows:
    """The documents of one row of chunks; takes their memory, 256 MiB at the published size."""

    path: Path
    name: str
    row: int
    array: ZarrArray
    decoder: Gpt2Decoder

    @property
    def files(self) -> dict[str, Path]:
        return self.array.chunks(self.row)

    def count(self) -> int:
        return self.array.rows(self.row)[1] - self.array.rows(self.row)[0]

    def read(self, start: int) -> Iterator[Record]:
        first, last = self.array.rows(self.row)
        tokens = self.array.read(first + start, last)
        for position, document in enumerate(tokens, start=start + 1):
            yield Record(position, _texts(document, self.decoder))


@dataclass(frozen=True)
class ZarrArray:
    """A two-dimensional array of uint16 in a Zarr folder of format 2."""

    path: Path
    shape: tuple[int, int]
    chunk_shape: tuple[int, int]
    separator: str

    @classmethod
    def open(cls, path: Path) -> ZarrArray:
        """The array of a folder.

        Raises:
          FileNotFoundError: it holds no `.zarray`.
          ValueError: that describes another kind of array.
        """
        metadata = path / ".zarray"
        if not metadata.is_file():
            raise FileNotFoundError(f"There is no {metadata.absolute()}; download {WANTED}.")
        try:
            found: dict[str, Any] = json.loads(metadata.read_text())
            shape, chunks = tuple(found["shape"]), tuple(found["chunks"])
            kind = (found["zarr_format"], found["dtype"], found["order"], len(shape))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{metadata} describes no array; download it again.") from error
        if kind != (2, "<u2", "C", 2):
            raise ValueError(
                f"{metadata} describes an array of (format, dtype, order, dimensions) {kind}, not "
                "(2, '<u2', 'C', 2); it is of another data set."
            )
        return cls(path, shape, chunks, found.get("dimension_separator", "."))

    @property
    def num_rows_of_chunks(self) -> int:
        return -(-self.shape[0] // self.chunk_shape[0])

    def rows(self, row: int) -> tuple[int, int]:
        """First document of a row of chunks and the first after it."""
        return row * self.chunk_shape[0], min((row + 1) * self.chunk_shape[0], self.shape[0])

    def chunks(self, row: int) -> dict[str, Path]:
        """The files of a row of chunks, whether they are there or not."""
        names = [
            f"{row}{self.separator}{column}"
            for column in range(-(-self.shape[1] // self.chunk_shape[1]))
        ]
        return {f"{self.path.name}/{name}": self.path / name for name in names}

    def read(self, first: int, last: int) -> np.ndarray:
        """Documents `first` up to `last`, uint16 `[documents, tokens]`.

        Raises:
          ValueError: a chunk is damaged.
        """
        tensorstore = _import_tensorstore()
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(self.path.resolve())}}
        try:
            array = tensorstore.open(spec, open=True, read=True).result()
            return array[first:last].read().result()
        except ValueError as error:
            raise ValueError(
                f"{self.path}: documents {first} to {last} cannot be read ({error}); download "
                "their chunks again."
            ) from error


@dataclass(frozen=True)
class FlatTokens:
    """The documents of a file of uint16, each up to its end of text."""

    path: Path
    name: str
    decoder: Gpt2Decoder

    @property
    def files(self) -> dict[str, Path]:
        return {self.name: self.path}

    def count(self) -> int:
        return sum(1 for _ in self._documents())

    def read(self, start: int) -> Iterator[Record]:
        for position, document in enumerate(self._documents(), start=1):
            if position > start:
                yield Record(position, _texts(document, self.decoder))

    def _documents(self) -> Iterator[np.ndarray]:
        if self.path.stat().st_size % 2:
            raise ValueError(f"{self.path} ends within a token of two bytes; download it again.")
        with self.path.open("rb") as file:
            rest = np.zeros(0, np.uint16)
            while len(window := np.fromfile(file, "<u2", _WINDOW)):
                *whole, tail = np.split(window, np.flatnonzero(window == EOS_ID) + 1)
                for document in whole:
                    yield np.concatenate([rest, document])
                    rest = rest[:0]
                rest = np.concatenate([rest, tail])
        if len(rest):
            yield rest


def longcrawl64(
    path: str | Path,
    *,
    vocabulary: str | Path,
    missing_chunks: Literal["refuse", "skip"] = "refuse",
    start: int = 0,
    stop: int | None = None,
) -> Source:
    """The documents in stored order; a stored row that holds ends of text is cut there.

    Args:
      path: a Zarr folder, or a flat `.bin` file.
      vocabulary: GPT-2's `encoder.json`.
      missing_chunks: "refuse" where a chunk file is not there, or "skip" the row of chunks, 2048
        documents, which it belongs to. Zarr itself would read zeros.
      start: first document that counts.
      stop: first document that counts no more.

    Raises:
      FileNotFoundError: there is no array or vocabulary.
      ValueError: chunks are missing, or the array is of another kind.
    """
    path, decoder = Path(path).expanduser(), Gpt2Decoder(vocabulary)
    settings: dict[str, Any] = {"vocabulary_sha256": decoder.sha256}
    parts: list[Part]
    if path.suffix == ".bin" and path.is_file():
        parts = [FlatTokens(path, path.name, decoder)]
    else:
        array = ZarrArray.open(path)
        rows = range(array.num_rows_of_chunks)
        missing = {
            row: names
            for row in rows
            if (names := [n for n, file in array.chunks(row).items() if not file.is_file()])
        }
        if missing and (missing_chunks == "refuse" or len(missing) == len(rows)):
            first = next(iter(missing.values()))[0]
            raise ValueError(
                f"{path} lacks {sum(map(len, missing.values()))} chunk files in {len(missing)} of "
                f"{len(rows)} rows of chunks, {first} the first; download them, or pass "
                "missing_chunks=skip to do without the documents of those rows."
            )
        settings |= {"shape": list(array.shape), "rows_of_chunks_skipped": len(missing)}
        parts = [
            ZarrRows(path, f"{path.name}/{row}", row, array, decoder)
            for row in rows
            if row not in missing
        ]
    return Source(
        name="longcrawl64", spans=select(parts, start=start, stop=stop), settings=settings
    )


def _texts(tokens: np.ndarray, decoder: Gpt2Decoder) -> tuple[str, ...]:
    """The texts between the ends of text, those that hold any."""
    pieces = np.split(tokens, np.flatnonzero(tokens == EOS_ID))
    texts = (decoder.decode(piece[piece != EOS_ID]) for piece in pieces)
    return tuple(text for text in texts if text)


def _import_tensorstore() -> Any:
    try:
        import tensorstore
    except ModuleNotFoundError as error:
        raise ImportError(
            "Zarr arrays are read with tensorstore, which is not installed; run: "
            "pip install 'fwpkm-jax[data]'"
        ) from error
    return tensorstore
