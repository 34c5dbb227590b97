"""SIGTERM and SIGINT turned into a request to stop after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax

from fwpkm_jax.training.runs.processes import Greatest


class StopSignals:
    """Holds SIGTERM and SIGINT back while a context lasts; `poll` and `wait` tell of one.

    A second signal acts as if this were not here: whoever cannot wait can still end the run.
    Outside the main thread Python allows no handlers and nothing is held back.

    Of many processes it is enough that one gets a signal. All of them call `poll` and `wait` in the
    same order and get the same answers, so that they stop after the same step.
    """

    def __init__(self) -> None:
        self._caught: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._greatest = Greatest() if jax.process_count() > 1 else None
        self._asked: jax.Array | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._catch)
        return self

    def poll(self) -> signal.Signals | None:
        """A signal that any process got, known one call late so that no process waits."""
        if self._greatest is None:
            return self._caught
        answer, self._asked = self._asked, self._greatest(self._caught or 0)
        return _signal(answer)

    def wait(self) -> signal.Signals | None:
        """A signal that any process has got by now."""
        if self._greatest is None:
            return self._caught
        return _signal(self._greatest(self._caught or 0))

    def _catch(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._caught = signal.Signals(number)
        self._restore()

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
