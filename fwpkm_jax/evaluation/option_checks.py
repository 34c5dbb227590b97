"""Checks that the options of evaluations share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fwpkm_jax.literals import nearest


def check_least(config: Any, least: int, *names: str) -> None:
    """Raises ValueError if one of the fields is below `least`; fields that are None pass."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")


def check_names(config: Any, known: Collection[str], name: str) -> None:
    """Raises ValueError unless a field holds distinct names among the known ones."""
    values = getattr(config, name)
    for value in values:
        if value not in known:
            raise ValueError(
                f"{name}: {value!r} is none of {', '.join(known)}{nearest(value, known)}."
            )
    if len(set(values)) < len(values):
        raise ValueError(f"{name}={values} names one twice.")
