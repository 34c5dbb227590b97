"""What an array shares with an array of another memory: all of it, all but some rows, or nothing.

A row is a run of numbers along the last axis: a slot's value, a cached token's key of one head.
Arrays are compared by their bytes, so that what is put together again is identical.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

Part = Literal["same", "rows", "whole"]

_BLOCK = 2**22  # Bytes compared at a time.


class Stored(NamedTuple):
    """What has to be stored of an array.

    Attributes:
      part: nothing, some of its rows, or the whole.
      arrays: what is stored, by name.
      rows: number of rows that are stored.
    """

    part: Part
    arrays: dict[str, np.ndarray]
    rows: int


def changed_rows(x: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Numbers of the rows, int64, whose bytes differ; the arrays have one shape and dtype."""
    new, old = _bytes(x), _bytes(base)
    step = max(1, _BLOCK // max(1, new.shape[1]))
    found = [
        start + np.flatnonzero(np.any(new[start : start + step] != old[start : start + step], 1))
        for start in range(0, len(new), step)
    ]
    return np.concatenate(found or [np.zeros(0, np.int64)]).astype(np.int64)


def num_rows(shape: tuple[int, ...]) -> int:
    """The number of rows of an array of this shape."""
    return int(np.prod(shape[:-1], dtype=np.int64)) if shape else 1


def stored(name: str, x: np.ndarray, base: np.ndarray | None) -> Stored:
    """What must be stored of an array, so that `put_together` with `base` gives it back."""
    whole = Stored("whole", {name: x}, num_rows(x.shape))
    if base is None or (base.shape, base.dtype) != (x.shape, x.dtype) or not x.size:
        return whole
    rows = changed_rows(x, base)
    if not len(rows):
        return Stored("same", {}, 0)
    values = _rows(x)[rows]
    if values.nbytes + rows.nbytes >= x.nbytes:
        return whole
    return Stored("rows", {f"{name}//rows": rows, f"{name}//values": values}, len(rows))


def put_together(
    name: str, part: Part, arrays: Mapping[str, np.ndarray], base: np.ndarray | None
) -> np.ndarray:
    """The array that `stored` took apart.

    Args:
      part: what is stored of it.
      arrays: what is stored, by name.
      base: the array of its base, which is changed in place if it can be; None for a whole one.
    """
    if part == "whole":
        return arrays[name]
    assert base is not None, "only a whole array has no base"
    if part == "same":
        return base
    x = base if base.flags.writeable else base.copy()
    _rows(x)[arrays[f"{name}//rows"]] = arrays[f"{name}//values"]
    return x


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(num_rows(x.shape), -1)


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(_rows(x)).view(np.uint8)
