"""Memory that threads have freed goes back to the system while a context lasts."""

import ctypes
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fwpkm_jax.storage.host_memory import aligned, freed_memory_returned, is_aligned

_SIZE, _COUNT = 64 * 1024, 1600
_needs_trim = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only the GNU C library keeps it"
)


def _resident_megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@_needs_trim
def test_freed_memory_goes_back_to_the_system():
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, malloc.argtypes, free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    kept = []

    def work():
        blocks = [malloc(_SIZE) for _ in range(_COUNT)]
        for block in blocks:
            ctypes.memset(block, 1, _SIZE)
        kept.append(blocks.pop())  # The last one, or the C library would give back by itself.
        for block in blocks:
            free(block)

    ctypes.CDLL(None).malloc_trim(0)  # What other tests have freed would serve the thread.
    before = _resident_megabytes()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    freed = _SIZE * _COUNT / 1e6
    assert _resident_megabytes() - before > 0.5 * freed, "kept for the next requests"
    with freed_memory_returned(every_s=0.01):
        deadline = time.monotonic() + 20
        while _resident_megabytes() - before > 0.5 * freed and time.monotonic() < deadline:
            time.sleep(0.01)
    assert _resident_megabytes() - before < 0.5 * freed
    assert "freed_memory_returned" not in {thread.name for thread in threading.enumerate()}
    free(kept[0])


def test_an_aligned_array_begins_where_devices_want_it():
    array = aligned((3, 5), np.dtype(np.float32))
    assert (array.shape, array.dtype) == ((3, 5), np.float32)
    assert is_aligned(array)
    assert not is_aligned(array[1:])
