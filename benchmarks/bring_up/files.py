"""Reads files that a program may have been writing when it was ended."""

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON of every whole line; none if there is no file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # The line that was being written.
            continue
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty if there is none or it is not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
