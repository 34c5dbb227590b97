"""How the columns of a projection become the convolution's results."""

from collections.abc import Sequence
from typing import NamedTuple

EPS = 1e-6
"""Added to a head's sum of squares, as in `core.numerics.l2_normalize`."""


class Part(NamedTuple):
    """Columns of every group, after those of the parts before, that become one result."""

    width: int
    """Columns of each group."""
    head: int | None = None
    """Width of the vectors that are brought to unit length, which divides `width`; None: none."""
    convolved: bool = True
    """False: these columns pass through unchanged; they have no taps."""


class Columns(NamedTuple):
    """The columns of a part in each group."""

    start: int
    stop: int


def columns_of(parts: Sequence[Part]) -> list[Columns]:
    """Where each part lies in a group."""
    found, start = [], 0
    for part in parts:
        found.append(Columns(start, start + part.width))
        start += part.width
    return found


def channels_of(parts: Sequence[Part], groups: int) -> list[Columns | None]:
    """Where each part lies among the channels of the taps; None for one that has none."""
    found, start = [], 0
    for part in parts:
        size = groups * part.width
        found.append(Columns(start, start + size) if part.convolved else None)
        start += size if part.convolved else 0
    return found
