"""The base class of the named test shapes of all operations."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Named sizes of one operation, shared by parity tests, ahead-of-time compiles and benchmarks.

    Each operation's `specs.py` has a subclass with its sizes, a list `SPECS`, and a function
    `sample(spec, dtype) -> dict` that draws the arguments of the public function.
    """

    name: str
    small: bool = True
    """Whether a CPU interprets it in about a second; other specs are tested on the device."""
    compiled: bool = False
    """Whether tests compile it ahead of time for every device; True for the paper's widths."""
