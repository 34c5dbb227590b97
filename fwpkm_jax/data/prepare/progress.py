"""Prints the progress of a preparation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from fwpkm_jax.status_line import StatusLine

_SECONDS = {True: 0.5, False: 30.0}  # Between lines, on a terminal and elsewhere.


class Progress:
    """Prints progress lines at intervals."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._line = StatusLine(stream)
        self._clock = clock
        self.begin(0)

    def begin(self, tokens: int) -> None:
        """Starts the clock of a run that continues from `tokens`."""
        self._started = self._shown = self._clock()
        self._first_tokens = tokens

    def show(self, *, part: str, documents: int, tokens: int, limit: int | None) -> None:
        """Prints a line if one is due.

        Args:
          part: name of the part that is being read.
          documents: documents encoded so far, including earlier runs.
          tokens: tokens encoded so far, including earlier runs.
          limit: tokens at which the work ends, if that is known.
        """
        now = self._clock()
        if now - self._shown < _SECONDS[self._line.on_terminal]:
            return
        self._shown = now
        speed = (tokens - self._first_tokens) / max(now - self._started, 1e-9)
        total = "" if limit is None else f" of {limit:,}"
        line = f"{part}  {documents:,} documents  {tokens:,}{total} tokens  {speed:,.0f} tokens/s"
        if limit is not None and speed > 0:
            line += f"  {max(limit - tokens, 0) / speed / 60:.0f} min left"
        self._line.show(line)

    def say(self, message: str) -> None:
        """Prints a line of its own."""
        self._line.say(message)
