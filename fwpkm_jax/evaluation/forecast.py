"""Logs how much longer an evaluation will take while it runs."""

import logging
import time
from collections.abc import Callable

from fwpkm_jax.io.status_line import format_duration

logger = logging.getLogger(__name__)

_PAUSE = 10.0
"""Seconds between two messages; a shorter evaluation logs no message."""


class Forecast:
    """Logs an estimate of an evaluation's remaining time, every ten seconds.

    The first piece of work is not measured, because it compiles.

    Args:
      name: the evaluation's name in the messages.
      total: amount of work, in `unit`; the attribute `total` may be changed during the work.
      unit: what the work is counted in, in the plural, such as "tokens".
      clock: returns the time in seconds.
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
        """Adds `amount` units of finished work and logs the estimate if it is due."""
        self._done += amount
        now = self._clock()
        if self._measured is None:
            self._measured = self._done, now
            return
        work, since = self._measured
        left = max(self.total - self._done, 0) * (now - since) / max(self._done - work, 1)
        if self._told is None:
            # After 0.1 s of work the estimate has the right order of magnitude.
            due = now - since >= 0.1 and left >= _PAUSE
        else:
            due = now - self._told >= _PAUSE and left > 0
        if due:
            self._told = now
            logger.info(
                "%s: %s of %s %s, about %s left",
                self._name,
                f"{self._done:,}",
                f"{self.total:,}",
                self._unit,
                format_duration(left),
            )
