"""Writes arrays in the format safetensors, into a file that is already open.

The package `safetensors` writes by name only, with a temporary file that a killed process leaves
for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO

import numpy as np

_DTYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (64, 32, 16)},
    **{f"int{bits}": f"I{bits}" for bits in (64, 32, 16, 8)},
    **{f"uint{bits}": f"U{bits}" for bits in (64, 32, 16, 8)},
    "bfloat16": "BF16",
    "bool": "BOOL",
}
_ALIGNMENT = 8


def write_tensors(
    file: IO[bytes], arrays: Mapping[str, np.ndarray], *, metadata: Mapping[str, str]
) -> None:
    """Appends the header and the arrays.

    Args:
      file: open for writing, at its start.
      arrays: by name.
      metadata: texts that the header holds.

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
        if x.dtype.name not in _DTYPES:
            raise ValueError(f"{name} is {x.dtype}, which a safetensors file cannot hold.")
        place = [end, end + x.nbytes]
        header[name] = {
            "dtype": _DTYPES[x.dtype.name],
            "shape": list(x.shape),
            "data_offsets": place,
        }
        end = place[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        x = np.ascontiguousarray(arrays[name])
        if x.dtype.byteorder == ">":
            x = x.astype(x.dtype.newbyteorder("<"))
        file.write(x.reshape(-1).view(np.uint8).data)
