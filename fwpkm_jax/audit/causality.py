"""Causality of any model: a changed token moves nothing that stands before it.

A path is a function from token ids `[batch, length]` to logits `[batch, length, vocab]`, of any
program. It is called with the same text again and again, of which one token is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fwpkm_jax.audit.lines import Line, difference_of, judged

Logits = Callable[[np.ndarray], np.ndarray]
"""A path: token ids `[batch, length]` to logits `[batch, length, vocab]`."""


class Look(NamedTuple):
    """What a change of the tokens at one position moved.

    Attributes:
      position: of the changed token.
      back: how many tokens before it the earliest logits that moved stand; 0 if none did.
      largest: largest absolute difference before the change.
      seen: whether the logits at the change or behind it moved, as they must.
    """

    position: int
    back: int
    largest: float
    seen: bool


def look_ahead(
    path: Logits,
    tokens: np.ndarray,
    positions: Sequence[int],
    *,
    vocab_size: int,
    rows_apart: bool = False,
) -> list[Look]:
    """What each change moved; a changed token is the next id.

    Args:
      path: see `Logits`; it must keep nothing from call to call.
      tokens: ids `[batch, length]`.
      positions: of the tokens to change, in all rows, one position after the other.
      vocab_size: number of ids.
      rows_apart: no row sees another one, so one call changes the first row at the first position,
        the second row at the second, and so on; the batch has as many rows as there are positions.
    """
    if rows_apart and len(tokens) != len(positions):
        raise ValueError(
            f"rows_apart=True needs a row for each of {len(positions)} positions, and tokens has "
            f"{len(tokens)}."
        )
    before, looks = np.asarray(path(tokens)), []
    after = np.zeros(0)
    if rows_apart:
        other = tokens.copy()
        rows = np.arange(len(positions))
        other[rows, positions] = (other[rows, positions] + 1) % vocab_size
        after = np.asarray(path(other))
    for number, position in enumerate(positions):
        own = slice(number, number + 1) if rows_apart else slice(None)
        if not rows_apart:
            other = tokens.copy()
            other[:, position] = (other[:, position] + 1) % vocab_size
            after = np.asarray(path(other))
        moved = _moved(before[own], after[own])
        early = np.flatnonzero(moved[:position])
        looks.append(
            Look(
                position,
                back=position - int(early[0]) if early.size else 0,
                largest=difference_of(before[own, :position], after[own, :position]),
                seen=bool(moved[position:].any()),
            )
        )
    return looks


def causality(
    name: str,
    path: Logits,
    tokens: np.ndarray,
    positions: Sequence[int],
    *,
    vocab_size: int,
    rows_apart: bool = False,
    rounding: float | None = None,
    cause: Callable[[Look], str] = lambda look: "",
) -> Line:
    """The line of a path: pass if no change moves logits before it.

    Args:
      name: of the path.
      path: see `look_ahead`.
      tokens: see `look_ahead`.
      positions: see `look_ahead`.
      vocab_size: see `look_ahead`.
      rows_apart: see `look_ahead`.
      rounding: largest difference that is not counted. None: 0, or what two equal calls differ by
        where a device adds in no fixed order; the line says which.
      cause: names the cause of the widest look ahead.
    """
    noise = difference_of(np.asarray(path(tokens)), np.asarray(path(tokens)))
    allowed = noise if rounding is None else rounding
    looks = look_ahead(path, tokens, positions, vocab_size=vocab_size, rows_apart=rows_apart)
    ahead = [look for look in looks if look.back and not look.largest <= allowed]
    blind = [look for look in looks if not look.seen]
    numbers = {
        "positions": list(positions),
        "back": [look.back for look in looks],
        "largest": max(look.largest for look in looks),
        "rounding": allowed,
        "two_equal_calls": noise,
    }
    if ahead:
        worst = max(ahead, key=lambda look: look.back)
        text = (
            f"A change of token {worst.position} moves logits {worst.back} "
            f"{'token' if worst.back == 1 else 'tokens'} before it, by {worst.largest:.2g}. "
            f"{cause(worst)}"
        ).rstrip()
    elif blind:
        text = f"A change of token {blind[0].position} moves no logits at all: it is not read."
    else:
        how = "bit for bit" if allowed == 0 else f"within {allowed:.1g}, the path's own rounding"
        text = f"{len(looks)} changes moved nothing before them, {how}."
    return Line(
        section="causality",
        name=name,
        verdict=judged(not ahead and not blind),
        text=text,
        numbers=numbers,
    )


def places(length: int, chunk_sizes: Sequence[int]) -> list[int]:
    """Positions to change: at, before and behind boundaries of chunks, inside chunks, the ends."""
    found = {1, length - 1}
    for size in chunk_sizes:
        for boundary in range(size, length, size):
            found |= {boundary - 1, boundary, boundary + 1}
        found |= {size // 2, size + size // 3}
    return sorted(place for place in found if 0 < place < length)


def _moved(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Whether the logits of each position differ in any bit in any row, `[length]`."""
    if before.shape != after.shape:
        raise ValueError(
            f"A path gave logits of shape {before.shape} and then {after.shape} for tokens of one "
            "shape; it must give logits [batch, length, vocab]."
        )
    return (_bits(before) != _bits(after)).any(axis=(0, 2))


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")
