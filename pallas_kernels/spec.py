"""The base class of the named test shapes of all operations."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Named sizes of one operation, shared by parity tests, ahead-of-time compiles and benchmarks.

    Each operation's `specs.py` subclasses this with its sizes, lists `SPECS`, and has
    `sample(spec, dtype) -> dict` that draws the arrays its public function takes.
    """

    name: str
    small: bool = True
    """Whether a CPU interprets it in about a second; others are tested on the device."""
    compiled: bool = False
    """Whether it is compiled ahead of time for every device; true for the paper's widths."""
