"""A command line's option names, and what a command says when it fails."""

import contextlib
import copy
import io
import logging
import os
import shlex
import signal
import sys
import threading
import traceback
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = "interrupted."
"""What a command says that SIGINT ends before it can do anything else."""

_PACKAGE = Path(__file__).parents[1]


def report(program: str, error: Exception) -> int:
    """Prints why `program` failed; its exit code.

    An error that this package raises on purpose reads as one clear line (exit code 2), and so does
    one of the system, such as a full disk (1). Any other one keeps its traceback (1).
    """
    if is_deliberate(error):
        say_error(program, error)
        return 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        say_error(program, f"{where}{error.strerror or error}")
        return 1
    traceback.print_exception(error)
    return 1


def is_deliberate(error: BaseException) -> bool:
    """Whether this package raised an error to tell the user something: not a library's, no bug."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or _PACKAGE not in Path(frames[-1].filename).resolve().parents:
        return False
    told = isinstance(error, ValueError | OSError | ImportError)
    return told or (frames[-1].line or "").startswith("raise ")


def shell_line(command: Sequence[str]) -> str:
    """What starts a program again in a shell, from its `sys.argv`.

    Example:
      >>> shell_line(["train.py", "--data.train_paths", "my books"])
      "python train.py --data.train_paths 'my books'"
      >>> shell_line(["/env/lib/fwpkm_jax/__main__.py", "eval", "runs/recall"])
      'python -m fwpkm_jax eval runs/recall'
    """
    program, *arguments = command or ("",)
    path = Path(program)
    start = ["python", program] if path.suffix == ".py" else [program]
    if path.name == "__main__.py":
        start = ["python", "-m", path.parent.name]
    return shlex.join([*start, *arguments])


def say_error(program: str, error: object) -> None:
    """Prints the last thing that a failing program says, on standard error."""
    sys.stdout.flush()
    print(f"{program}: {visible(str(error))}", file=sys.stderr, flush=True)


def say_what_lasts(line: str) -> None:
    """Prints what a silent minute is for, where somebody waits at a terminal."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def interruptible(program: str) -> Iterator[None]:
    """While the context lasts, SIGINT ends the process in one line with exit code 130.

    For imports: an exception in the middle of one would end in a traceback of a library's.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        os.write(2, f"{program}: {INTERRUPTED}\n".encode())
        os._exit(128 + signal.SIGINT)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # Only the main thread may, and a handler of the program that calls this one stays.
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def visible(text: str) -> str:
    """A text that a terminal shows and does not obey.

    Control characters but line feeds and tabs, and those that turn the direction of writing,
    become escapes such as `\\x1b`. Whatever comes from a file or a model is printed by it.
    """
    return "".join(x.encode("unicode_escape").decode() if _is_control(x) else x for x in text)


def escape_what_is_lacking() -> None:
    """Lets standard output print characters that its encoding lacks as escapes such as `\\u2019`.

    As standard error does; else a long answer ends in an error of its first such character.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _is_control(character: str) -> bool:
    if character in "\n\t":
        return False
    return character in _TURNS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


_TURNS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class _Visible(logging.Formatter):
    """Formats records as a terminal shows them, without the tracebacks of libraries."""

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.exc_info = record.exc_text = record.stack_info = None
        return visible(super().format(record))


class _ToTerminal(logging.StreamHandler):
    """Writes to what `sys.stderr` is at the time; what libraries log of an error that they also
    raise is left out."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.setFormatter(_Visible(form))

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.name.split(".")[0] in ("absl", "asyncio", "orbax"):
            return
        self.stream = sys.stderr
        super().emit(record)


def start_logging(form: str = "%(message)s") -> None:
    """Prints warnings on standard error in a form of `logging`, one line each."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        of_absl = type(handler).__module__.split(".")[0] == "absl"
        if type(handler) in (logging.StreamHandler, _ToTerminal) or of_absl:
            root.removeHandler(handler)
    root.addHandler(_ToTerminal(form))
    if root.level == logging.NOTSET or root.level > logging.WARNING:
        root.setLevel(logging.WARNING)


def leave_out_abandoned_writes() -> None:
    """Keeps what the storage library says of writes that it gave up from being printed.

    If one of its parallel writes fails, it closes the loop in which the others report; each of
    them then prints a traceback. The error of the first one is raised.
    """
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        if str(found.exc_value) != "Event loop is closed":
            before(found)

    if getattr(before, "__qualname__", "") != hook.__qualname__:
        sys.unraisablehook = hook
