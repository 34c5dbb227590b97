"""How long an evaluation will take, told while it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fwpkm_jax.status_line import format_duration

logger = logging.getLogger(__name__)

_PAUSE = 10.0
"""Seconds between two messages; a shorter evaluation says nothing."""


class Forecast:
    """Logs the time an evaluation still takes: once it can tell, and then every ten seconds.

    The first piece of work is not measured, because it compiles.

    Args:
      name: of the evaluation.
      total: of the work, in `unit`; it may be changed while the work goes on.
      unit: what the work is counted in, in the plural.
      clock: seconds.
    """

    def __init__(
        self, name: str, *, total: int, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self._name, self._unit, self._clock = name, unit, clock
        self._done = 0
        self._measured: tuple[int, float] | None = None  # Work and time at the first piece's end.
        self._told: float | None = None

    def add(self, amount: int) -> None:
        """Counts work that is done."""
        self._done += amount
        now = self._clock()
        if self._measured is None:
            self._measured = self._done, now
            return
        work, since = self._measured
        left = max(self.total - self._done, 0) * (now - since) / max(self._done - work, 1)
        if self._told is None:
            # A tenth of a second of work tells the order of what is left.
            due = now - since >= 0.1 and left >= _PAUSE
        else:
            due = now - self._told >= _PAUSE and left > 0
        if due:
            self._told = now
            logger.info(
                "%s: %s of %s %s, about %s left",
                *(self._name, f"{self._done:,}", f"{self.total:,}", self._unit),
                format_duration(left),
            )
