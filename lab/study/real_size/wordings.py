"""Sentences that state a number under a key, in many wordings; twenty are kept from training.

A wording is an opening, which names the key, and a link, which separates it from the number by 4 to
83 bytes. No opening or link of `HELD_OUT` is in `TRAINED`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

_OPENINGS = (
    "The secret number for ID-{}",
    "The code of locker {}",
    "The number on ticket {}",
    "What opens gate {}",
    "The combination of safe {}",
    "The weight of parcel {}",
    "The price of lot {}",
    "The number of house {}",
    "The sign of the ship {}",
    "The count of sheep in field {}",
    "The debt of client {}",
    "The mark inside watch {}",
    "The page that names {}",
    "The answer to riddle {}",
    "The toll of bridge {}",
    "The depth of well {}",
    "The password of agent {}",
)
_LINKS = (
    " is ",
    ": ",
    ", as we know, is ",
    " was written down as ",
    ", so they told me yesterday, is ",
    ", unless the old clerk was mistaken when he copied it into his book, must be ",
)
_OTHER_OPENINGS = (
    "The winning figure of horse {}",
    "The fine of prisoner {}",
    "The rank of manuscript {}",
    "The height of tower {}",
    "The telephone of doctor {}",
)
_OTHER_LINKS = (
    " equals ",
    " has always been ",
    ", said the captain, comes to ",
    ", if my memory serves me after all these long years abroad, turned out to be ",
)


class Wording(NamedTuple):
    """How a sentence states a number."""

    opening: str
    """Names the key, at `{}`."""
    link: str
    """Stands between the key and the number."""

    def question(self, key: str) -> bytes:
        """The sentence up to its number."""
        return (self.opening.format(key) + self.link).encode()

    def sentence(self, key: str, value: str) -> bytes:
        """The sentence and the space after it."""
        return self.question(key) + f"{value}. ".encode()


TRAINED = tuple(itertools.starmap(Wording, itertools.product(_OPENINGS, _LINKS)))
"""102 wordings of training."""
HELD_OUT = tuple(itertools.starmap(Wording, itertools.product(_OTHER_OPENINGS, _OTHER_LINKS)))
"""20 wordings that no training has."""


def parts(of: tuple[Wording, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The openings and the links of wordings, each once, in order."""
    return tuple(dict.fromkeys(x.opening for x in of)), tuple(dict.fromkeys(x.link for x in of))
