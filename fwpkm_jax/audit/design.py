"""Which tokens are changed together, so that few calls of a path show any single leak.

A path is a function from token ids to what a program makes of them. It is called again and again
with a text of which a part is changed; whatever moves elsewhere is a leak.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fwpkm_jax.audit.lines import difference_of, named_arrays

Path = Callable[[np.ndarray], Any]
"""Token ids `[rows, length]` to logits `[rows, length, vocab]`, or to a dict of them as "logits"
and of other arrays `[rows, ...]`, such as the memory that each row has at the end."""

ROUNDING = 1e-5
"""Share of the spread of an array that two equal calls may differ by. It is above the rounding of
float32 sums in another order, and below what a claim of recall rests on."""
_NOISE = 4
"""Times the measured noise that passes: the largest of many differences exceeds a single one."""
_BESIDE = 10
"""Times the bound of equal calls that passes where a token's rounding depends on the tokens beside
it, which equal calls do not show. In six texts experts moved a memory by 0.3 to 1.03 bounds."""


def antichain(count: int) -> np.ndarray:
    """Calls that tell any two of `count` units apart: bool `[calls, count]`, who is changed.

    For every ordered pair some call changes the first unit and leaves the second as it is, so that
    a leak from any unit to any other one shows. Every unit is changed in some call.

    Example:
      >>> antichain(3).astype(int)
      array([[1, 1, 0],
             [1, 0, 1],
             [0, 1, 1]])

    References: Sperner 1928, "Ein Satz über Untermengen einer endlichen Menge": `calls` choose
    `calls / 2` is the largest number of sets of which none contains another one.
    """
    calls = next(n for n in itertools.count(1) if math.comb(n, (n + 1) // 2) >= count)
    found = np.zeros((calls, count), bool)
    chosen = itertools.combinations(range(calls), (calls + 1) // 2)
    for unit, of_unit in zip(range(count), chosen, strict=False):
        found[list(of_unit), unit] = True
    return found


def boundaries(length: int, chunk_sizes: Sequence[int], *, most: int) -> list[int]:
    """Positions from which on a text is changed: all, or at most `most` of them.

    Half of these lie at, before and behind the edges of chunks, the first and the last of them
    included; the others are spread evenly.
    """
    if length - 1 <= most:
        return list(range(1, length))
    edges = sorted(
        place
        for place in range(1, length)
        if any((place + shift) % size == 0 for size in chunk_sizes for shift in (-1, 0, 1))
    )
    few = min(len(edges), most // 2)
    chosen = np.linspace(0, len(edges) - 1, few).astype(int)
    evenly = np.linspace(1, length - 1, most - few).astype(int)
    return sorted({*(edges[number] for number in chosen), *evenly.tolist()})


def other_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Another token at every place."""
    steps = np.random.default_rng(0).integers(1, vocab_size, size=tokens.shape)
    return ((tokens + steps) % vocab_size).astype(tokens.dtype)


def arrays_of(path: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """What a path gives, by the names of the arrays' places; "logits" are among them.

    Raises:
      ValueError: its logits are not `[rows, length, vocab]`.
    """
    found = path(tokens)
    named = named_arrays(found if isinstance(found, Mapping) else {"logits": found})
    if named["logits"].ndim != 3 or named["logits"].shape[:2] != tokens.shape:
        raise ValueError(
            f"A path gave logits of shape {named['logits'].shape} for tokens {tokens.shape}; it "
            "must give [batch, length, vocab]."
        )
    return named


class Noise(NamedTuple):
    """What two equal calls differ by.

    Attributes:
      measured: the largest difference.
      bound: the largest difference that may be rounding.
      allowed: the largest difference that is not counted: 0 if equal calls are equal bit for bit,
        and rounding does not depend on what is read beside.
      nans: how many numbers of a call are NaN.
    """

    measured: float
    bound: float
    allowed: float
    nans: int

    @classmethod
    def of(cls, first: np.ndarray, again: np.ndarray, rounding: float, *, exact: bool) -> Noise:
        """The noise of an array; `rounding` is a share of the array's spread, for `exact` see
        `causality`."""
        nans = int(np.isnan(first).sum())
        measured, bound = difference_of(first, again), rounding * float(np.std(first))
        allowed = min(_NOISE * measured, bound) if exact else _BESIDE * bound
        return cls(measured, bound, allowed, nans)

    def refusal(self) -> str:
        """Why the results cannot be judged; empty if they can."""
        if self.nans:
            return f"{self.nans:,} numbers are NaN, which no other text moves: the model diverges."
        if self.measured <= self.bound or not self.measured:
            return ""
        return (
            f"Two equal calls differ by {self.measured:.2g}, and at most {self.bound:.1g} passes "
            "as rounding: what comes out does not depend on the tokens alone, so no leak can be "
            "excluded."
        )

    def told(self) -> str:
        """How exactly results were compared."""
        if not self.allowed:
            return "bit for bit"
        if not self.measured:
            return f"within {self.allowed:.1g}, as tokens are rounded with those beside them"
        return f"within {self.allowed:.1g}, as two equal calls differ by {self.measured:.1g}"
