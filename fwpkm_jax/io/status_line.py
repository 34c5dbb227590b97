"""A line that changes on a terminal, plain lines elsewhere."""

import sys
from typing import TextIO

from fwpkm_jax.io.terminal import visible


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
