"""What a command says when it fails: one line for a mistake of its user, a traceback for a bug."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parent


def report(program: str, error: Exception) -> int:
    """Prints why `program` failed; its exit code.

    An error raised by this package's own code on purpose reads as one clear line (exit code 2).
    One raised inside a library is nobody's message to the user and keeps its traceback (1).
    """
    frames = traceback.extract_tb(error.__traceback__)
    deliberate = bool(frames) and _PACKAGE in Path(frames[-1].filename).resolve().parents
    if deliberate:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1
