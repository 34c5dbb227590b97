"""A store of `memory://` that fails one request, or all from one on, as servers do."""

import functools
import threading
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

ONCE = ("503", "reset", "time-out", "empty", "cut")
"""How one request fails. 503 and time-out: it was not done. reset: it was, and its answer is lost.
empty, cut: what is read has lost its end; a write, a list or a removal was done without an answer.
"""
_REQUESTS = ("info", "find", "cat_file", "cat_ranges", "get_file", "pipe_file", "rm_file")


def failing(patch, number=None, how="503"):
    """Counts the requests; the `number`th fails, and with `how="away"` all that come after it."""
    count, counting, within = [0], threading.Lock(), threading.local()

    def wrap(name, whole):
        def call(self, *arguments, **options):
            do = functools.partial(whole, self, *arguments, **options)
            if getattr(within, "request", False):  # A request may ask for others.
                return do()
            within.request = True
            try:
                with counting:
                    count[0] += 1
                    fails = count[0] == number or (how == "away" and number and count[0] > number)
                return _failed(name, how, do, arguments) if fails else do()
            finally:
                within.request = False

        return call

    for name in _REQUESTS:
        patch.setattr(MemoryFileSystem, name, wrap(name, getattr(MemoryFileSystem, name)))
    return count


def _failed(name, how, do, arguments):
    """What a request gives or raises that fails."""
    if how in ("503", "away"):
        raise OSError("503 Slow Down")
    if how == "time-out":
        raise TimeoutError("The read operation timed out")
    found = do()
    if how == "reset" or name in ("pipe_file", "rm_file"):
        raise ConnectionResetError("Connection reset by peer")
    keep = 0.5 if how == "cut" else 0
    if name == "cat_file":
        return found[: int(len(found) * keep)]
    if name == "cat_ranges":
        return [x[: int(len(x) * keep)] if isinstance(x, bytes) else x for x in found]
    if name == "get_file":
        file = Path(arguments[1])
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
        return None
    if how == "empty":
        return {}
    raise ValueError("Expecting value: line 1 column 1 (char 0)")  # Of a list that is cut.
