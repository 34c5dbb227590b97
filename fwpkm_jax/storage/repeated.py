"""Something that is done every few seconds beside the rest of a program."""

import threading
from collections.abc import Callable


class Repeated:
    """Calls a function every few seconds in a thread of its own, until `end` or a context ends."""

    def __init__(self, call: Callable[[], object], every: float, *, name: str) -> None:
        """Starts the thread."""
        self._call, self._every = call, every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(self._every):
            self._call()

    def end(self) -> None:
        """Returns once the last call has."""
        self._ended.set()
        self._thread.join()

    def __enter__(self) -> "Repeated":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
