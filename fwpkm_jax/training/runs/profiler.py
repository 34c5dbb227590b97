"""A trace of some steps, for TensorBoard's profiler or Perfetto."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import jax

from fwpkm_jax.io.atomic import own_folder

WARM_UP = 3
"""Steps of a session before the trace: the first ones are slower than the others."""


class Profiler:
    """Writes a trace of a session's steps into a folder. Leaving its context ends the trace.

    Args:
      folder: `RUN/profile`; each session adds files under its time.
      start: steps done before this session.
      steps: number of steps to trace; None: no trace. A session that ends earlier traces fewer.
      say: prints a line when the trace is written.
    """

    def __init__(
        self, folder: Path, *, start: int, steps: int | None, say: Callable[[str], None]
    ) -> None:
        self._folder, self._steps, self._say = folder, steps, say
        self._first = start + WARM_UP
        self._newest = start
        self._tracing = False

    def step_done(self, step: int) -> None:
        """Must be called after each step, in order; the next step may have started already."""
        self._newest = step
        if self._steps is not None and step == self._first:
            for part in ("", "plugins", "plugins/profile"):
                own_folder(self._folder / part)
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif self._tracing and step == self._first + (self._steps or 0):
            self._stop()

    def _stop(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
        if self._newest == self._first:
            return  # The session ended before another step was done.
        self._say(
            f"Wrote a trace of steps {self._first + 1} to {self._newest} to {self._folder}; open "
            "it with TensorBoard's profile plugin (xprof), or its .trace.json.gz with Perfetto."
        )

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._tracing:
            self._stop()
