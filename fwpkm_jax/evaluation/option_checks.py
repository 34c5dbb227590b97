"""Checks that the options of evaluations share."""

from __future__ import annotations

from typing import Any


def check_least(config: Any, least: int, *names: str) -> None:
    """Raises ValueError if one of the fields is below `least`; fields that are None pass."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")
