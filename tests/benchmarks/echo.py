"""A measurement that returns its task."""

from typing import Any


def work(task: Any) -> dict[str, Any]:
    return {"got": task}


def talk(task):
    yield from ({"got": task, "turn": turn} for turn in range(2))
