"""bAbI's questions, and texts of a chosen length that hide their facts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fwpkm_jax.data import Tokenizer
from fwpkm_jax.data.documents import read_text, refuse_pointer

TASKS = tuple(f"qa{number}" for number in range(1, 21))
_LEAST_TOKENS = 3  # Shorter sentences of the background are left out; they are headings and signs.


class Story(NamedTuple):
    """A question of bAbI with all facts that were told before it."""

    facts: tuple[str, ...]
    question: str
    answer: str


def find_task(folder: Path, task: str) -> Path:
    """The test file of a task below a folder, as `qa1_single-supporting-fact_test.txt`.

    Raises:
      FileNotFoundError: there is none. ValueError: there are several.
    """
    found = sorted(folder.rglob(f"{task}_*test.txt")) if folder.is_dir() else [folder]
    if not found:
        raise FileNotFoundError(
            f"{folder.absolute()} holds no {task}_*_test.txt; name the folder en or en-10k of bAbI."
        )
    if len(found) > 1:
        raise ValueError(
            f"{folder} holds {len(found)} files of {task}, as {found[0].relative_to(folder)}; name "
            "one of its folders."
        )
    return found[0]


def read_stories(path: Path) -> list[Story]:
    """All questions of a file of bAbI, in order; answers to earlier ones are no facts.

    Raises:
      ValueError: a line is none of bAbI's, or no question stands in the file.
    """
    refuse_pointer(path)
    stories, facts = [], []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        order, _, rest = line.partition(" ")
        if not order.isdigit() or not rest:
            raise ValueError(
                f"{path}, line {number}: {line[:60]!r} is no number with a sentence; name a "
                "file of bAbI."
            )
        if order == "1":
            facts = []
        text, *asked = (part.strip() for part in rest.split("\t"))
        if not asked:
            facts.append(text)
        elif not asked[0]:
            raise ValueError(f"{path}, line {number}: the question has no answer.")
        else:
            stories.append(Story(tuple(facts), text, asked[0]))
    if not stories:
        raise ValueError(f"{path} asks no question; name a file of bAbI.")
    return stories


class Background:
    """Sentences of a text, one after the other, from the start again where it ends."""

    def __init__(self, sentences: Sequence[str], tokenizer: Tokenizer):
        """Counts the tokens of each sentence with the space before it.

        Raises:
          ValueError: no sentence has enough tokens.
        """
        sizes = [(one, len(tokenizer.encode(f" {one}"))) for one in sentences]
        self._sentences = [(one, size) for one, size in sizes if size >= _LEAST_TOKENS]
        if not self._sentences:
            raise ValueError("text: the background has no sentences; name a longer text.")
        self._next = 0

    def take(self, tokens: int) -> list[str]:
        """The next sentences that together have at most so many tokens."""
        found = []
        while True:
            sentence, size = self._sentences[self._next % len(self._sentences)]
            tokens -= size
            if tokens < 0:
                return found
            found.append(sentence)
            self._next += 1


def hide(facts: Sequence[str], background: Sequence[str], rng: np.random.Generator) -> str:
    """The facts in their order at random places between the sentences of the background."""
    places = np.sort(rng.integers(len(background) + 1, size=len(facts)))
    sentences: list[str] = []
    for number in range(len(background) + 1):
        sentences += [fact for fact, place in zip(facts, places, strict=True) if place == number]
        sentences += background[number : number + 1]
    return " ".join(sentences)
