"""Short texts of several facts, whose slots are filled anew each time: `passages.txt`.

Where `grammar.py` writes one sentence for each fact, a passage is a letter, a list, a note or a
talk as people write them, with questions in other words.
"""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PASSAGES = Path(__file__).parent / "passages.txt"
_SLOT = re.compile(r"\{([a-z])([0-9])\}")
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_COUNTS = [
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "twenty",
    "thirty",
]
_HOURS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
_WHERE = (
    *("behind the", "under the", "in the", "on the", "near the", "next to the", "above the"),
    *("beside the", "between the", "at the", "inside the", "below the", "behind a", "under an old"),
)
_BEFORE_THING = ("the", "the", "a", "an old", "the red", "the second", "a broken", "my", "the big")
_MONEY = ("{} euros", "${}", "{} dollars", "{}", "{} pounds", "{} crowns", "£{}")
_TRIES = 1000
_ABOUT = 30
"""Characters before a value that tell its place from others."""


class Passage(NamedTuple):
    """A text with slots, and its questions.

    Attributes:
      text: with slots like `{n1}`.
      asked: questions and answers, with slots of the text.
    """

    text: str
    asked: list[tuple[str, str]]


class Filled(NamedTuple):
    """What is asked of a text whose slots are filled.

    Attributes:
      question: without its mark.
      answer: as it stands in the text, without the blank before it.
      about: what stands before that blank.
    """

    question: str
    answer: str
    about: str


Draws = dict[str, Callable[[random.Random], str]]
"""What draws a slot, by the letter of its kind."""


def read_passages(text: str) -> list[Passage]:
    """The passages of `passages.txt`.

    Raises:
      ValueError: a line is neither a text, nor a question with its answer behind " = ".
    """
    found: list[Passage] = []
    for line in text.splitlines():
        if line.startswith("? ") and " = " in line and found:
            question, _, answer = line[2:].rpartition(" = ")
            found[-1].asked.append((question, answer))
        elif line.startswith("?"):
            raise ValueError(f"{line!r} is no question of a passage: '? QUESTION = ANSWER'.")
        elif line and not line.startswith("#"):
            found.append(Passage(line, []))
    return found


def draws(
    word: Callable[[random.Random], str],
    place: Callable[[random.Random], str],
    name: Callable[[random.Random], str],
) -> Draws:
    """What draws each kind of slot, from what draws words, places and names."""

    def count(rng: random.Random) -> str:
        return rng.choice(_COUNTS) if rng.random() < 0.4 else str(rng.randint(2, 99))

    def code(rng: random.Random) -> str:
        if rng.random() < 0.3:
            return f"{rng.choice('ABCDEFGHJKLMNPRSTUVWXYZ')}{rng.randint(1, 99)}"
        return "".join(rng.choices("0123456789", k=rng.randint(2, 4)))

    def time(rng: random.Random) -> str:
        hour = rng.randint(1, 12)
        form = rng.randrange(4)
        if form == 0:
            return f"{hour}:{rng.choice(['00', '15', '30', '45', '05', '20', '40'])}"
        if form == 1:
            return f"{rng.choice(['half past', 'quarter to'])} {rng.choice(_HOURS)}"
        return f"{rng.choice(_HOURS)} o'clock" if form == 2 else f"{hour} {rng.choice('ap')}m"

    def money(rng: random.Random) -> str:
        return rng.choice(_MONEY).format(rng.choice([1, 5, 10, 50]) * rng.randint(1, 99))

    return {
        "n": name,
        "p": place,
        "w": word,
        "a": lambda rng: f"{rng.choice(_BEFORE_THING)} {word(rng)}",
        "l": lambda rng: f"{rng.choice(_WHERE)} {word(rng)}",
        "c": count,
        "k": code,
        "d": lambda rng: rng.choice(_DAYS),
        "t": time,
        "m": money,
        "y": lambda rng: str(rng.randint(1700, 2029)),
    }


def fill_passage(passage: Passage, rng: random.Random, kinds: Draws) -> tuple[str, list[Filled]]:
    """A text with its slots filled, and its questions, where a blank stands before the answer.

    Args:
      passage: what is filled.
      rng: draws the slots.
      kinds: what draws a slot of each kind.

    Raises:
      ValueError: there are too few words to draw.
    """
    values: dict[str, str] = {}
    for slot in _SLOT.finditer(passage.text):
        tries = 0
        while slot[0] not in values:
            drawn = kinds[slot[1]](rng)
            if drawn not in values.values():  # Values of one text differ.
                values[slot[0]] = drawn
            tries += 1
            if tries > _TRIES:
                raise ValueError(f"{_TRIES} draws gave no new {slot[0]}; name a larger vocabulary.")

    def filled(form: str) -> str:
        return _SLOT.sub(lambda slot: values[slot[0]], form)

    text = filled(passage.text)
    text = text[0].upper() + text[1:]
    asked: list[Filled] = []
    for question, answer in passage.asked:
        said = filled(answer)
        places = [x.start() for x in re.finditer(rf" {re.escape(said)}(?!\w)", text)]
        if places:
            about = text[max(0, places[0] - _ABOUT) : places[0]]
            asked.append(Filled(filled(question), said, about))
    return text, asked
