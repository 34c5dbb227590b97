"""Carries the verdicts on kernels from one machine to another, in one file."""

import json
from pathlib import Path
from typing import Any

from pallas_kernels import verdicts


def give(file: Path) -> None:
    """Writes all verdicts that are kept here into one file, for another machine to `take`."""
    kept = {
        one.name: read for one in sorted(verdicts.folder().glob("*.json")) if (read := _read(one))
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def take(file: Path) -> int:
    """Keeps the verdicts of a file that `give` wrote; returns their number, 0 if there is no file.

    Each is for its kind of device, versions and content of this package, as if it was found here.
    A verdict that is here already stays.
    """
    kept = _read(file) or {}
    for name, facts in kept.items():
        here = verdicts.folder() / Path(name).name
        if not here.exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_text(json.dumps(facts), encoding="utf-8")
    return len(kept)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
