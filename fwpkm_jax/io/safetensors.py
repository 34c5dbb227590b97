"""Reads safetensors files, which may come from anywhere, one tensor at a time, and writes them.

A file is the length of a header in eight bytes, the header in JSON, and the tensors' bytes one
after the other. The header is compared with the file's size before anything else is read. Nothing
is mapped: a tensor is read into memory of its own, which goes when the caller lets go of it.

The package `safetensors` writes by name only, with a temporary file that a killed process leaves
for ever; `write_tensors` writes into a file that is already open.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

from fwpkm_jax.io.status_line import watched
from fwpkm_jax.io.untrusted import (
    OutsideFileError,
    is_pointer,
    parse_json,
    reading,
    refuse_pointer,
    shown,
    size_of,
)
from fwpkm_jax.storage.host_memory import aligned

_MOST_HEADER_BYTES = 2**24
_MOST_AXES = 32
_ALIGNMENT = 8
"""Bytes of which a written header is a multiple."""
DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
FLOATS = ("F64", "F32", "F16", "BF16")
"""What weights are stored as."""


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


class SafetensorsFile(Mapping[str, StoredTensor]):
    """The tensors of a file by name; `read` gives one.

    Attributes:
      path: of the file.
      metadata: texts that whoever wrote it added.
    """

    def __init__(self, path: str | Path, *, otherwise: str = "fetch it again"):
        """Reads the header and compares it with the file's size.

        Args:
          path: of the file.
          otherwise: what the user can do if it is damaged.

        Raises:
          FileNotFoundError: there is no such file.
          OutsideFileError: it is damaged, cut short, or no safetensors file.
        """
        self.path, self._otherwise = Path(path), otherwise
        header, start, size = self._header()
        metadata = header.pop("__metadata__", None)
        self.metadata: dict[str, str] = {} if metadata is None else metadata
        if not isinstance(self.metadata, dict) or not all(
            isinstance(value, str) for value in self.metadata.values()
        ):
            raise self._error("holds other values than texts", "__metadata__")
        self._tensors = {
            name: self._stored(name, entry, start, size) for name, entry in header.items()
        }
        end = start
        for name, tensor in sorted(self._tensors.items(), key=lambda item: item[1][3:]):
            if tensor.start != end:
                what = "overlaps" if tensor.start < end else "leaves a gap behind"
                raise self._error(f"{what} the tensor before it", f"tensor {name!r}")
            end = tensor.end
        if end != size:
            raise self._error(f"has {size - end} bytes behind its last tensor")

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str) -> np.ndarray:
        """The tensor in its own dtype.

        Raises:
          OutsideFileError: its dtype is none of NumPy's, or the file has become shorter.
        """
        return read_tensor(name, self._tensors[name], otherwise=self._otherwise)

    def _header(self) -> tuple[dict[str, Any], int, int]:
        """The header, where the tensors begin, and the size of the file."""
        size = size_of(self.path, otherwise=self._otherwise)
        with (
            reading(self.path, otherwise=self._otherwise),
            self.path.open("rb") as stream,
        ):
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            whole = 2 <= length <= min(size - 8, _MOST_HEADER_BYTES)
            content = stream.read(length if whole else 100)
        if is_pointer(first + content):
            refuse_pointer(self.path)
        if not whole:
            raise self._error(
                f"is damaged, or no safetensors file: of its {size:,} bytes the header would take "
                f"{length:,} (at most {_MOST_HEADER_BYTES:,})"
            )
        header = parse_json(
            content,
            self.path,
            place="header",
            otherwise=self._otherwise,
            kind=dict,
            unique=True,
        )
        return header, 8 + length, size

    def _stored(self, name: str, entry: Any, start: int, size: int) -> StoredTensor:
        place = f"tensor {shown(repr(name), 100)}"
        if not isinstance(entry, dict):
            raise self._error("has no description of it", place)
        dtype, shape, ends = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str):
            raise self._error(f"gives dtype {shown(dtype, 40)!r}", place)
        if not _are_counts(shape) or len(shape) > _MOST_AXES:
            raise self._error(f"gives the shape {shown(shape, 60)}", place)
        if not _are_counts(ends) or len(ends) != 2 or ends[0] > ends[1]:
            raise self._error(f"gives data_offsets {shown(ends, 60)}", place)
        first, last = (start + x for x in ends)
        item = DTYPES.get(dtype)
        if last > size or (item is not None and last - first != math.prod(shape) * item.itemsize):
            raise self._error(
                f"is damaged or cut short: {dtype}{list(shape)} would stand at bytes {first} to "
                f"{last} of {size}",
                place,
            )
        return StoredTensor(self.path, dtype, tuple(shape), first, last)

    def _error(self, problem: str, place: str = "") -> OutsideFileError:
        return OutsideFileError(self.path, problem, place, self._otherwise)


def read_tensor(
    name: str, tensor: StoredTensor, *, otherwise: str = "fetch it again"
) -> np.ndarray:
    """A tensor of a file whose header has been checked.

    Raises:
      OutsideFileError: its dtype is none of NumPy's, or the file has become shorter.
    """
    file, dtype, shape, start, _ = tensor
    place = f"tensor {name!r}"
    if dtype not in DTYPES:
        problem = f"is stored as {shown(dtype, 40)}; {', '.join(DTYPES)} can be read"
        raise OutsideFileError(file, problem, place, otherwise)
    with reading(file, place=place, otherwise=otherwise):
        array = aligned(shape, DTYPES[dtype])
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            rest = array.reshape(-1).view(np.uint8).data
            while rest and (count := stream.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise ValueError(f"it has lost its end since it was opened: {len(rest)} bytes")
    return array


def write_tensors(
    file: IO[bytes], arrays: Mapping[str, np.ndarray], *, metadata: Mapping[str, str]
) -> None:
    """Appends the header and the arrays.

    Raises:
      ValueError: the format has no name for a dtype.
      OSError: they cannot be written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    # Wide dtypes first, so that every array starts at a multiple of its item's size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    end = 0
    for name in names:
        x = arrays[name]
        if x.dtype.name not in _NAMES:
            raise ValueError(f"{name} is {x.dtype}, which a safetensors file cannot hold.")
        place = [end, end + x.nbytes]
        header[name] = {
            "dtype": _NAMES[x.dtype.name],
            "shape": list(x.shape),
            "data_offsets": place,
        }
        end = place[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in watched(names, "arrays written"):
        x = np.ascontiguousarray(arrays[name])
        if x.dtype.byteorder == ">":
            x = x.astype(x.dtype.newbyteorder("<"))
        file.write(x.reshape(-1).view(np.uint8).data)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(x) is int and 0 <= x < 2**62 for x in values)
