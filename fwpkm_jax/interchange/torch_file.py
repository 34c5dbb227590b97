"""Reads the tensors of a file that `torch.save` wrote, without torch and without running its code.

Such a file is a zip archive of raw arrays and a pickle that describes them. A pickle can name any
function to be called; this reader accepts the names that tensors and dicts need and refuses every
other one. No file is unpacked to disk.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_MOST_PICKLE_BYTES = 2**26
_DTYPES = {
    "BFloat16Storage": ml_dtypes.bfloat16,
    "HalfStorage": np.float16,
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "BoolStorage": np.bool_,
}


class _StorageType(NamedTuple):
    dtype: Any


def read_torch_file(path: str | Path) -> Any:
    """The content of the file: dicts, lists, numbers and strings, with arrays in place of tensors.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it has another format, is damaged, or holds objects of other kinds.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive)
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} is not a zip archive, the format of torch since version 1.6: {error}. "
            "Convert it to safetensors."
        ) from error
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read(archive: zipfile.ZipFile) -> Any:
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"it has {len(pickles)} entries data.pkl; one was expected.")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in archive.namelist():
        order = _member(archive, f"{folder}byteorder", 16).decode()
        if order != "little":
            raise ValueError(f"its byte order is {order!r}; only 'little' is supported.")
    stream = io.BytesIO(_member(archive, pickles[0], _MOST_PICKLE_BYTES))
    return _TensorUnpickler(stream, archive, folder).load()


def _member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
        raise ValueError(
            f"{name} is compressed, or has {info.file_size} bytes; at most {most} are expected."
        )
    return archive.read(info)  # Reading to the end checks the archive's checksum.


class _TensorUnpickler(pickle.Unpickler):
    """Accepts the names that a dict of tensors needs, and refuses all others."""

    def __init__(self, stream: io.BytesIO, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(stream)
        self._archive, self._folder = archive, folder
        self._storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if module == "torch" and name in _DTYPES:
            return _StorageType(_DTYPES[name])
        if (module, name) not in known:
            raise pickle.UnpicklingError(
                f"it holds a {module}.{name}, which is not a tensor; save the model's state_dict "
                "alone."
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _location, size = pid
        if kind != "storage" or not isinstance(storage, _StorageType):
            raise pickle.UnpicklingError(f"it refers to {kind!r}, not to a tensor's storage.")
        if key not in self._storages:
            num_bytes = size * np.dtype(storage.dtype).itemsize
            data = _member(self._archive, f"{self._folder}data/{key}", num_bytes)
            if len(data) != num_bytes:
                raise pickle.UnpicklingError(
                    f"storage {key} has {len(data)} bytes; expected are {num_bytes}."
                )
            self._storages[key] = np.frombuffer(data, storage.dtype)
        return self._storages[key]


def _tensor(storage: np.ndarray, offset: int, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    """A tensor as a view of its storage."""
    shape, strides = tuple(shape), tuple(strides)
    reach = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if offset < 0 or min((0, *shape, *strides)) < 0:
        raise pickle.UnpicklingError("a tensor has a negative size, stride or offset.")
    if math.prod(shape) and reach >= storage.size:
        raise pickle.UnpicklingError(f"a tensor of shape {shape} reaches beyond its storage.")
    return np.lib.stride_tricks.as_strided(
        storage[offset:], shape, [s * storage.itemsize for s in strides], writeable=False
    )


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    return tensor
