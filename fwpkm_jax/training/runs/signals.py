"""Turns SIGTERM and SIGINT into a request to stop after the current step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import jax

from fwpkm_jax.training.runs.processes import Greatest


class Stopped(Exception):
    """A signal came while there was nothing to save."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.signal = number


class StopSignals:
    """Catches SIGTERM and SIGINT while its context lasts; `poll` and `wait` report them.

    The first signal prints a line at once. A second signal has its usual effect, so a run can
    always be ended. Python allows handlers only in the main thread; in other threads the context
    does nothing.

    In a run of several processes one signal to one process is enough. All processes must call
    `poll` and `wait` in the same order; they get the same answers, so they stop after the same
    step.

    Args:
      say: prints a line.
    """

    def __init__(self, *, say: Callable[[str], None] = lambda line: None) -> None:
        self._say = say
        self._caught: signal.Signals | None = None
        self._nothing_to_save = False
        self._previous: dict[signal.Signals, Any] = {}
        self._greatest = Greatest() if jax.process_count() > 1 else None
        self._asked: jax.Array | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._catch)
        return self

    @contextlib.contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """While the context lasts, a signal ends the body at once.

        In a run of several processes the body goes on until all processes have agreed to stop.

        Raises:
          Stopped: a signal came during the body or before it.
        """
        if self._greatest is not None:
            yield
            return
        self._nothing_to_save = True
        try:
            if self._caught is not None:
                raise Stopped(self._caught)
            yield
        finally:
            self._nothing_to_save = False

    def poll(self) -> signal.Signals | None:
        """A signal that any process got, or None; one call late, so that no process waits."""
        if self._greatest is None:
            return self._caught
        answer, self._asked = self._asked, self._greatest(self._caught or 0)
        return _signal(answer)

    def wait(self) -> signal.Signals | None:
        """A signal that any process has got so far, or None; waits for the other processes."""
        if self._greatest is None:
            return self._caught
        return _signal(self._greatest(self._caught or 0))

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = signal.Signals(number)
        self._restore()
        # Printing fails if the signal came in the middle of a line that is being printed.
        with contextlib.suppress(RuntimeError):
            if not self._nothing_to_save:
                self._say(
                    f"{self._caught.name}: stops as soon as every step done is saved; a second "
                    "signal stops at once, without saving."
                )
        if self._nothing_to_save:
            raise Stopped(self._caught)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()


def _signal(number: jax.Array | None) -> signal.Signals | None:
    return signal.Signals(int(number)) if number is not None and int(number) else None
