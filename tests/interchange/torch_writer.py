"""Files in the format of `torch.save`, made without torch.

Checked once against files that torch 2 wrote; what a reader may see beside plain tensors is here
too: shared storages, views, parameters, and names that are not tensors.
"""

import collections
import io
import pickle
import sys
import types
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_STORAGES = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
}


@dataclass(frozen=True)
class Tensor:
    """A view of a flat array, strides in elements."""

    storage: np.ndarray
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parameter: bool = False


def whole(array: np.ndarray, *, parameter: bool = False) -> Tensor:
    """A contiguous tensor."""
    strides = tuple(s // array.itemsize for s in array.strides)
    return Tensor(array.reshape(-1), 0, array.shape, strides, parameter)


@dataclass(frozen=True)
class _Storage:
    array: np.ndarray


def write_torch_file(
    path: Path, content: Any, *, folder: str = "archive", compress: bool = False
) -> None:
    """Pickles the content, its `Tensor`s as torch's, and stores their arrays beside it."""
    with _fake_torch() as torch:
        stream = io.BytesIO()
        pickler = _Pickler(stream, torch)
        pickler.dump(content)
    how = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr(f"{folder}/data.pkl", stream.getvalue())
        archive.writestr(f"{folder}/byteorder", "little")
        for key, array in enumerate(pickler.arrays):
            archive.writestr(f"{folder}/data/{key}", array.tobytes())


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, torch: Any) -> None:
        super().__init__(stream, protocol=2)
        self.torch, self.arrays = torch, []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        same = [key for key, array in enumerate(self.arrays) if array is obj.array]
        if not same:
            self.arrays.append(obj.array)
        key = same[0] if same else len(self.arrays) - 1
        kind = getattr(self.torch, _STORAGES[obj.array.dtype])
        return ("storage", kind, str(key), "cpu", obj.array.size)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        hooks = collections.OrderedDict()
        if obj.parameter:
            plain = Tensor(obj.storage, obj.offset, obj.shape, obj.strides)
            return self.torch._utils._rebuild_parameter, (plain, True, hooks)
        view = (_Storage(obj.storage), obj.offset, obj.shape, obj.strides, False, hooks)
        return self.torch._utils._rebuild_tensor_v2, view


@contextmanager
def _fake_torch():
    """Modules in which a pickler finds the names that it writes down, in place of any real ones."""
    real = {x: sys.modules.pop(x) for x in [*sys.modules] if x.split(".")[0] == "torch"}
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        function = types.FunctionType((lambda *_: None).__code__, {}, name)
        function.__module__, function.__qualname__ = "torch._utils", name
        setattr(utils, name, function)
    for name in _STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    torch._utils = utils
    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        yield torch
    finally:
        del sys.modules["torch"], sys.modules["torch._utils"]
        sys.modules |= real
