"""Reads arrays in Zarr folders."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.io.untrusted import read_json
from fwpkm_jax.lazy_imports import import_extra


@dataclass(frozen=True)
class ZarrArray:
    """A two-dimensional array of uint16 in a Zarr folder of format 2, as rows of chunks.

    Zarr reads a missing chunk as zeros, so callers must check the files of `chunks`.
    """

    path: Path
    shape: tuple[int, int]
    chunk_shape: tuple[int, int]
    separator: str

    @classmethod
    def open(cls, path: Path, *, wanted: str) -> "ZarrArray":
        """The array of a folder.

        Raises:
          FileNotFoundError: it holds no `.zarray`.
          ValueError: that describes another kind of array.
        """
        metadata = path / ".zarray"
        if not metadata.is_file():
            raise FileNotFoundError(f"There is no {metadata.absolute()}; download {wanted}.")
        try:
            found: dict[str, Any] = read_json(metadata, kind=dict)
            shape, chunks = tuple(found["shape"]), tuple(found["chunks"])
            if not all(type(x) is int and 0 < x < 2**40 for x in (*shape, *chunks)):
                raise ValueError("sizes of an array are numbers above 0")
            kind = (found["zarr_format"], found["dtype"], found["order"], len(shape))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{metadata} describes no array; download it again.") from error
        if kind != (2, "<u2", "C", 2):
            raise ValueError(
                f"{metadata} describes an array of (format, dtype, order, dimensions) {kind}, not "
                "(2, '<u2', 'C', 2); it is of another data set."
            )
        return cls(path, shape, chunks, found.get("dimension_separator", "."))

    def rows(self, row: int) -> tuple[int, int]:
        """First index of a row of chunks and the first after it."""
        return row * self.chunk_shape[0], min((row + 1) * self.chunk_shape[0], self.shape[0])

    def chunks(self, row: int) -> dict[str, Path]:
        """Paths of the files of a row of chunks; they may be missing."""
        names = [
            f"{row}{self.separator}{column}"
            for column in range(-(-self.shape[1] // self.chunk_shape[1]))
        ]
        return {f"{self.path.name}/{name}": self.path / name for name in names}

    def read(self, first: int, last: int) -> np.ndarray:
        """Rows `first` up to `last`, uint16 `[rows, columns]`.

        Raises:
          ValueError: a chunk is damaged.
        """
        tensorstore = import_extra("tensorstore", "Zarr arrays are read", extra="data")
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(self.path.resolve())}}
        try:
            array = tensorstore.open(spec, open=True, read=True).result()
            return array[first:last].read().result()
        except ValueError as error:
            raise ValueError(
                f"{self.path}: rows {first} to {last} cannot be read ({error}); download "
                "their chunks again."
            ) from error
