"""A chat in a terminal or a pipe: lines in, answers out, commands that begin with a slash."""

import contextlib
import io
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

import numpy as np

from fwpkm_jax.data.streams import formats
from fwpkm_jax.io.terminal import visible
from fwpkm_jax.literals import nearest
from fwpkm_jax.run.conversation import Conversation

HELP = {
    "/read FILE": "reads a text file into the memory; nothing is answered",
    "/save NAME": "saves the memory as a point to go back to",
    "/forget NAME": "goes back to that point; without NAME to what was last saved",
    "/memory": "shows what of the memory is in use",
    "/help": "shows these lines",
    "/quit": "saves the memory and leaves, as the end of the input and Ctrl-C do",
}
"""The commands of a chat."""

_AT_ONCE = 8  # Tokens between two looks at the signals.


class Chat:
    """One chat, from its first line to its end.

    Args:
      talk: the conversation, which is open.
      max_new_tokens: most tokens of an answer.
      source: of the lines; a terminal gets a prompt.
      sink: where answers go.
      errors: where it goes what went wrong in a command.
    """

    def __init__(
        self,
        talk: Conversation,
        *,
        max_new_tokens: int,
        source: TextIO | None = None,
        sink: TextIO | None = None,
        errors: TextIO | None = None,
    ) -> None:
        self._talk, self._max_new_tokens = talk, max_new_tokens
        self._source, self._sink = source or sys.stdin, sink or sys.stdout
        self._errors = errors or sys.stderr
        self._waits, self._num_lines = False, 0
        self.caught: signal.Signals | None = None
        """The signal that ended the chat; None: its lines ended."""

    def run(self) -> None:
        """Answers until the lines end, `/quit`, SIGINT or SIGTERM; then saves the memory.

        A line that is not UTF-8 is named and left out.

        Raises:
          OSError: the memory cannot be saved.
        """
        talk = self._talk
        self._say(f"{talk.name}: {talk.tokens_read:,} tokens read. /help lists the commands.")
        if isinstance(self._source, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):  # Its caller has read lines of it.
                self._source.reconfigure(errors="surrogateescape")
        with self._signals():
            try:
                with contextlib.suppress(KeyboardInterrupt):  # Raised only while it waits.
                    self._lines()
            finally:
                talk.save()
            if talk.has_memory:
                self._say(f"The memory {talk.name!r} is saved.")
            else:
                self._say(f"The conversation {talk.name!r}, which has no memory, is saved.")

    def _lines(self) -> None:
        while self.caught is None and (line := self._next_line()) is not None:
            self._num_lines += 1
            line = line.strip()
            if line == "/quit":
                return
            try:
                self._check(line)
                if line.startswith("/"):
                    self._command(*line.split(maxsplit=1))
                elif line:
                    self._answer(line)
            except (ValueError, OSError) as error:
                print(visible(str(error)), file=self._errors, flush=True)

    def _check(self, line: str) -> None:
        """Raises a ValueError if bytes of the line are no text."""
        if any("\udc80" <= character <= "\udcff" for character in line):
            escaped = line.encode(errors="surrogateescape").decode(errors="backslashreplace")
            raise ValueError(f"Line {self._num_lines} is not UTF-8 and was left out: {escaped}")

    def _answer(self, line: str) -> None:
        """Prints an answer as it is made; a character of several tokens when it is complete."""
        talk, shown = self._talk, ""
        new = np.zeros(0, np.int32)
        for tokens in talk.reply(line, max_new_tokens=self._max_new_tokens, at_once=_AT_ONCE):
            new = np.concatenate([new, tokens])
            text = talk.tokenizer.decode(new)
            complete = text.rstrip("\ufffd")
            if complete.startswith(shown):
                print(visible(complete[len(shown) :]), end="", file=self._sink, flush=True)
                shown = complete
            if self.caught is not None:
                break
        self._say("")

    def _command(self, command: str, argument: str = "") -> None:
        talk = self._talk
        if command == "/read":
            text = read_text(Path(argument))
            before = talk.tokens_read
            talk.read(talk.tokenizer.encode(text))
            self._say(f"Read {talk.tokens_read - before:,} tokens.")
        elif command == "/save":
            talk.save(argument or None)
            self._say(f"Saved{f' as {argument}' if argument else ''}.")
        elif command == "/forget":
            talk.forget(argument or None)
            self._say(f"Back at {talk.tokens_read:,} tokens read.")
        elif command == "/memory":
            self._say("\n".join(talk.usage()))
        elif command == "/help":
            width = max(map(len, HELP))
            self._say("\n".join(f"{name:{width}}  {about}" for name, about in HELP.items()))
        else:
            names = [name.split()[0] for name in HELP]
            raise ValueError(f"{command} is none of {', '.join(names)}{nearest(command, names)}.")

    def _say(self, text: str) -> None:
        print(visible(text), file=self._sink, flush=True)

    def _next_line(self) -> str | None:
        """The next line; None at the end of the input."""
        self._waits = True
        try:
            if self._source.isatty():
                return input("> ")
            return self._source.readline() or None
        except EOFError:
            return None
        finally:
            self._waits = False

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the wait for a line, or the answer after some tokens."""

        def catch(number: int, frame: FrameType | None) -> None:
            self.caught = signal.Signals(number)
            if self._waits:  # Elsewhere the state may be half replaced.
                raise KeyboardInterrupt

        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    stack.callback(signal.signal, number, signal.signal(number, catch))
            yield


def read_text(path: Path) -> str:
    """A file's text, as training reads it.

    Raises:
      ValueError: it cannot be read, or is not UTF-8.
    """
    try:
        return formats.read_text(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
