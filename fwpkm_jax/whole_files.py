"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def unfinished(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(path.name + ".tmp")


def write_text(path: Path, text: str) -> None:
    """Writes a text: a reader finds the old file or the new one."""
    temporary = unfinished(path)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # Or the name may reach the disk before the contents.
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as `write_text` does.

    Raises:
      ValueError: there is a NaN or an infinity in it.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
