"""Results as text tables."""

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

PASSES = {"writing": "memory writing", "frozen": "writing disabled"}
"""What tables call the two passes over the same texts, by their name in records."""


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table; the first column is aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *others = (
            f"{entry:{'<' if i == 0 else '>'}{widths[i]}}" for i, entry in enumerate(row)
        )
        return "  ".join([first, *others]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, rows)])


def signed(difference: Record) -> str:
    """A difference of losses as text, with its interval if it has one."""
    if difference["interval"] is None:
        return f"{difference['loss']:+.4f}"
    low, high = difference["interval"]
    return f"{difference['loss']:+.4f} [{low:+.4f}, {high:+.4f}]"


def share(score: Record) -> str:
    """A share of right answers as text, with its interval."""
    low, high = score["interval"]
    return f"{score['accuracy']:.3f} [{low:.3f}, {high:.3f}]"
