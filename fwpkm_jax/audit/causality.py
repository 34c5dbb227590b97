"""Causality of any program: what stands behind a token moves nothing before it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from fwpkm_jax.audit.design import ROUNDING, Noise, Path, arrays_of, other_tokens
from fwpkm_jax.audit.lines import Line, gaps, judged


class Look(NamedTuple):
    """What another text from a position on moved.

    Attributes:
      position: of the first token that was changed.
      back: how many tokens before it the earliest logits that moved stand; 0 if none did.
      largest: largest absolute difference before the change.
      seen: whether the logits at the change or behind it moved, as they must.
    """

    position: int
    back: int
    largest: float
    seen: bool


def look_ahead(
    path: Path,
    tokens: np.ndarray,
    positions: Sequence[int],
    *,
    vocab_size: int,
    rows_apart: bool = False,
    together: int = 1,
    rounding: float = ROUNDING,
    exact: bool = True,
) -> tuple[list[Look], Noise]:
    """What another text from each position on moved, and the path's noise.

    Args:
      path: see `design.Path`; of what it gives only the logits count.
      tokens: ids `[rows, length]`.
      positions: from each of them on the text is changed up to its end.
      vocab_size: number of ids.
      rows_apart: no row sees another one, so one call changes the rows from different positions on.
        False: all rows are changed from the same position on.
      together: with `rows_apart`, as many adjacent rows may see each other after all.
      rounding: see `causality`.
      exact: see `causality`.
    """
    rows = np.arange(len(tokens))
    owners = rows // together if rows_apart else 0 * rows
    units = int(owners[-1]) + 1
    before = arrays_of(path, tokens)["logits"]
    others, places = other_tokens(tokens, vocab_size), np.arange(tokens.shape[1])
    found: list[tuple[int, np.ndarray]] = []
    for start in range(0, len(positions), units):
        part = list(positions[start : start + units])
        own = np.resize(part, units)[owners]
        changed = np.where(places >= own[:, None], others, tokens)
        moved = gaps(before, arrays_of(path, changed)["logits"], axes=2)
        found += [(place, moved[owners == unit].max(0)) for unit, place in enumerate(part)]
    # At the end, so that what a program keeps from call to call shows as well.
    noise = Noise.of(before, arrays_of(path, tokens)["logits"], rounding, exact=exact)
    looks = []
    for place, moved in found:
        early = np.flatnonzero(moved[:place] > noise.allowed)
        looks.append(
            Look(
                place,
                back=place - int(early[0]) if early.size else 0,
                largest=float(moved[:place].max(initial=0.0)),
                seen=bool((moved[place:] > noise.allowed).any()),
            )
        )
    return looks, noise


def causality(
    name: str,
    path: Path,
    tokens: np.ndarray,
    positions: Sequence[int],
    *,
    vocab_size: int,
    rows_apart: bool = False,
    together: int = 1,
    rounding: float = ROUNDING,
    exact: bool = True,
    cause: Callable[[Look], str] = lambda look: "",
) -> Line:
    """The line of a path: pass if no change moves logits before it.

    Args: as of `look_ahead`, and
      name: of the path.
      positions: a look ahead over `n` tokens can hide where no position lies among `n` tokens, and
        the line says how many that is.
      rounding: share of the logits' spread that two equal calls may differ by, where a device adds
        in no fixed order. The line fails if they differ by more.
      exact: False: ten times as much passes also where two equal calls are equal, because a
        token's rounding depends on the tokens beside it, as that of experts may.
      cause: names the cause of the widest look ahead.
    """
    find = partial(look_ahead, path, tokens, vocab_size=vocab_size, rounding=rounding, exact=exact)
    looks, noise = find(positions, rows_apart=rows_apart, together=together)
    ahead = [look for look in looks if look.back]
    blind = [look for look in looks if not look.seen]
    if noise.refusal():
        text = noise.refusal()
    elif ahead:
        worst = max(ahead, key=lambda look: look.back)
        # Rows that were changed from other positions on may have moved it, and not later tokens.
        (alike,), _ = find([worst.position]) if rows_apart else ([worst], noise)
        if alike.back:
            text = (
                f"Another text from token {worst.position} on moves logits {worst.back} "
                f"{'token' if worst.back == 1 else 'tokens'} before it, by {worst.largest:.2g}. "
                f"{cause(worst)}"
            ).rstrip()
        else:
            text = (
                "Rows see each other: another text in other rows moves logits by "
                f"{worst.largest:.2g}. Where all rows have another text from token "
                f"{worst.position} on, none before it move."
            )
    elif blind:
        text = f"Another text from token {blind[0].position} on moves no logits: it is not read."
    else:
        text = (
            f"Another text from each of {_covered(positions, tokens.shape, rows_apart)} on moves "
            f"nothing before it, {noise.told()}."
        )
    return Line(
        section="causality",
        name=name,
        verdict=judged(not (noise.refusal() or ahead or blind)),
        text=text,
        numbers={
            "length": tokens.shape[1],
            "positions": list(positions),
            "back": [look.back for look in looks],
            "largest": max(look.largest for look in looks),
            "rounding": noise.allowed,
            "two_equal_calls": noise.measured,
        },
    )


def _covered(positions: Sequence[int], shape: tuple[int, ...], rows_apart: bool) -> str:
    """Which positions were looked at, in which rows, and what could hide between them."""
    rows, length = shape
    hidden = int(np.max(np.diff([0, *sorted(positions), length]))) - 1
    told = f"{len(set(positions)):,} of {length - 1:,} positions"
    told += f", each in one of {rows} rows" if rows_apart and rows > 1 else ""
    return f"{told} (a look over up to {hidden} tokens could hide)" if hidden else told
