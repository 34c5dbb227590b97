"""The lines that a run prints while it trains."""

import collections
from collections.abc import Mapping
from typing import TextIO

from fwpkm_jax.io.status_line import StatusLine, format_duration


class Speedometer:
    """Measures the mean time per step over the last `window` steps."""

    def __init__(self, window: int = 50) -> None:
        self._seconds: collections.deque[float] = collections.deque(maxlen=window)
        self.total_seconds = 0.0
        self.total_steps = 0

    def step_done(self, seconds: float) -> None:
        """Counts one step that took `seconds`, see `training.fit.Report`."""
        self._seconds.append(seconds)
        self.total_seconds += seconds
        self.total_steps += 1

    @property
    def seconds_per_step(self) -> float:
        """Mean over the window; call it after at least one step."""
        return max(sum(self._seconds) / len(self._seconds), 1e-9)


class Progress:
    """Prints the progress of a run: every step on a terminal, otherwise every few steps."""

    def __init__(self, *, steps: int, every: int, stream: TextIO | None = None) -> None:
        """Sets up the display.

        Args:
          steps: steps of the whole run.
          every: steps between two lines if `stream` is not a terminal.
          stream: where to print; None: standard output.
        """
        self._steps, self._every = steps, every
        self._line = StatusLine(stream)

    def show(self, step: int, values: Mapping[str, float], *, seconds_per_step: float) -> None:
        """Prints a step's line if it is due."""
        if not (self._line.on_terminal or step % self._every == 0 or step == self._steps):
            return
        self._line.show(
            f"step {step}/{self._steps}  loss {values['loss']:.4f}  "
            f"grad {values['grad_norm']:.3g}  lr {values['lr']:.2e}  "
            f"{values['tokens_per_second']:,.0f} tok/s  "
            f"ETA {format_duration((self._steps - step) * seconds_per_step)}"
        )

    def say(self, message: str) -> None:
        """Prints a separate line below the progress line."""
        self._line.say(message)
