"""What every operation's named test shapes have in common."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Named sizes of one operation, shared by parity tests, ahead-of-time compiles and benchmarks.

    Each operation's `specs.py` subclasses this with its sizes, lists `SPECS`, and has
    `sample(spec, dtype) -> dict` that draws the arrays its public function takes.
    """

    name: str
    small: bool = True
    """Interpreters on a CPU get through it in about a second; larger ones wait for the device."""
    compiled: bool = False
    """Compiled ahead of time for every device: the widths that the paper trains with."""
