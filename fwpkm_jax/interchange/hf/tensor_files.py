"""Reads safetensors files one tensor at a time.

A file is the length of a header in eight bytes, the header in JSON, and the tensors' bytes. Nothing
is mapped: a tensor is read into memory of its own, which goes when the caller lets go of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fwpkm_jax.host_memory import aligned
from fwpkm_jax.outside_files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000
_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class StoredTensor(NamedTuple):
    """Where a tensor is.

    Attributes:
      file: that holds it.
      dtype: as the format calls it, "BF16".
      shape: of the tensor.
      start: of its first byte.
      end: behind its last byte.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFiles(Mapping[str, StoredTensor]):
    """The tensors of a folder by name; `read` gives one."""

    def __init__(self, folder: str | Path, *, file: str | None = None):
        """Reads the headers.

        Args:
          folder: holds `model.safetensors`, or several files and an index of them.
          file: a file of another name, read alone.

        Raises:
          FileNotFoundError: a file is missing.
          ValueError: a file is damaged, or is not what the index says.
        """
        folder = Path(folder)
        self._tensors: dict[str, StoredTensor] = {}
        index = folder / INDEX
        if file is not None or not index.is_file():
            path = folder / (file or SINGLE)
            if not path.is_file():
                other = "" if file is not None else f", and no {INDEX} is there"
                raise FileNotFoundError(f"{path} does not exist{other}.")
            self._tensors = _read_header(path)
            return
        places = read_json(index, otherwise="fetch it again").get("weight_map", {})
        for name in dict.fromkeys(places.values()):
            if Path(name).name != name or not (folder / name).is_file():
                raise FileNotFoundError(f"{index} names {name!r}, which is not in {folder}.")
            self._tensors |= _read_header(folder / name)
        lost = [name for name in places if name not in self._tensors]
        if lost:
            raise ValueError(f"{index} names {lost[0]}, which is in none of its files.")

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str) -> np.ndarray:
        """The tensor in its own dtype.

        Raises:
          ValueError: its dtype is none of float64, float32, float16 and bfloat16.
        """
        file, dtype, shape, start, _ = self._tensors[name]
        if dtype not in _DTYPES:
            raise ValueError(
                f"{file.name}: {name} is stored as {dtype}; weights of {', '.join(_DTYPES)} can be "
                "read, quantised ones cannot."
            )
        array = aligned(shape, _DTYPES[dtype])
        # Whether the file holds so many bytes has been checked.
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            rest = array.reshape(-1).view(np.uint8).data
            while rest and (count := stream.readinto(rest)):
                rest = rest[count:]
        return array


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(f"{path} is no whole safetensors file: its header has {length} bytes.")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: StoredTensor(
                    path,
                    str(entry["dtype"]),
                    tuple(int(n) for n in entry["shape"]),
                    *(8 + length + int(n) for n in entry["data_offsets"]),
                )
                for name, entry in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: its header cannot be read ({error}).") from error
    for name, tensor in tensors.items():
        held = tensor.end - tensor.start
        item = _DTYPES.get(tensor.dtype)
        needed = held if item is None else math.prod(tensor.shape) * item.itemsize
        if min(tensor.shape, default=0) < 0 or held != needed or not tensor.end <= size:
            raise ValueError(
                f"{path} is damaged or cut short: {name} of {tensor.dtype}{list(tensor.shape)} "
                f"would stand at bytes {tensor.start} to {tensor.end} of {size}."
            )
    return tensors
