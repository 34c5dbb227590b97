"""The host's memory: arrays that devices take over as they are, and what is freed given back."""

import contextlib
import ctypes
import math
from collections.abc import Iterator

import numpy as np

from fwpkm_jax.storage.repeated import Repeated

_ALIGNMENT = 64  # Of bytes that XLA takes over without a copy.


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that a CPU device can have as it is, without a copy; its numbers are arbitrary."""
    size = math.prod(shape) * dtype.itemsize
    held = np.empty(size + _ALIGNMENT, np.uint8)
    first = -held.ctypes.data % _ALIGNMENT
    return held[first : first + size].view(dtype).reshape(shape)


def is_aligned(array: np.ndarray) -> bool:
    """Whether an array begins where one of `aligned` does."""
    return array.ctypes.data % _ALIGNMENT == 0


@contextlib.contextmanager
def freed_memory_returned(*, every_s: float = 0.1) -> Iterator[None]:
    """While this context lasts, memory that a thread has freed soon goes back to the system.

    The GNU C library keeps what a thread frees for the same thread's next requests. Where many
    threads compress and write a model in pieces, they keep more than they use. Other C libraries
    are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        yield
        return
    with Repeated(lambda: trim(0), every_s, name="freed_memory_returned"):
        yield
