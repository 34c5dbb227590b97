"""A line that changes on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from typing import TextIO, TypeVar

from fwpkm_jax.io.terminal import say_what_lasts, visible

_Item = TypeVar("_Item")
_SECONDS = 0.2  # Between two lines.


def format_duration(seconds: float) -> str:
    """`1:02:03`, `2:03` or `0:03`."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds_left:02}"
    return f"{minutes}:{seconds_left:02}"


class StatusLine:
    """The last line of a stream's output."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Prints to a stream; default standard output."""
        self._stream = sys.stdout if stream is None else stream
        self.on_terminal = self._stream.isatty()
        self._open = False

    def show(self, line: str) -> None:
        """Prints where the work stands, on a terminal over what was shown before."""
        if self.on_terminal:
            # Erases to the end of the line: the line before may have been longer.
            print(f"\r{visible(line)}\x1b[K", end="", file=self._stream, flush=True)
            self._open = True
        else:
            print(visible(line), file=self._stream, flush=True)

    def say(self, message: str) -> None:
        """Prints a line of its own, below the one that changes."""
        if self._open:
            print(file=self._stream)
            self._open = False
        print(visible(message), file=self._stream, flush=True)

    def clear(self) -> None:
        """Erases the line that changes."""
        if self._open:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
            self._open = False


_watched: ContextVar[StatusLine | None] = ContextVar("watched", default=None)


@contextlib.contextmanager
def progress_shown(line: str) -> Iterator[None]:
    """Says what lasts; while the context does, `watched` shows how far it is.

    Only where standard error is a terminal.
    """
    say_what_lasts(line)
    before = _watched.set(StatusLine(sys.stderr) if sys.stderr.isatty() else None)
    try:
        yield
    finally:
        _watched.reset(before)


def watched(items: Collection[_Item], done: str) -> Iterator[_Item]:
    """The items; in a context of `progress_shown` with their number and the time that is left.

    Args:
      items: that are worked on one after the other.
      done: what was done to them, such as "arrays read".
    """
    line, began = _watched.get(), time.monotonic()
    shown = began
    for number, item in enumerate(items):
        now = time.monotonic()
        if line is not None and number and now - shown > _SECONDS:
            left = format_duration((now - began) / number * (len(items) - number))
            line.show(f"{done}: {number:,}/{len(items):,}  ETA {left}")
            shown = now
        yield item
    if line is not None:
        line.clear()
