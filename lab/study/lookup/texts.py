"""Sentences to train on and to test on, text whose spans are repeated, and rows of unseen books."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fwpkm_jax.data import NeedleMix
from lab.study.real_size import wordings

NEEDLES = 4
"""Needles of a row, all in the same sentence."""
DIGITS = 6
LENGTH = 1024
"""Bytes of a row."""

SPAN = (32, 96)
"""Least and greatest length of a repeated span, in bytes."""
SPAN_EVERY = 192
"""Bytes of text from one repeated span to the next."""
SPAN_DISTANCE = (128, 768)
"""Least and greatest distance from the end of a span to its repetition, in bytes of text."""


def sentence_of(wording: wordings.Wording) -> str:
    """The wording as a sentence of `NeedleMix`."""
    return wording.opening.replace("{}", "{key}") + wording.link + "{value}."


def trained_sentences(number: int) -> tuple[str, ...]:
    """That many sentences, openings and links in turn; the first of any larger number.

    Raises:
      ValueError: there are not as many.
    """
    openings, links = wordings.parts(wordings.TRAINED)
    if not 0 < number <= len(wordings.TRAINED):
        raise ValueError(f"{number} sentences: there are 1 to {len(wordings.TRAINED)}.")
    # 17 openings and 6 links have no common divisor, so that no pair comes twice.
    pairs = ((openings[n % len(openings)], links[n % len(links)]) for n in range(number))
    return tuple(sentence_of(wordings.Wording(*pair)) for pair in pairs)


HELD_OUT = tuple(map(sentence_of, wordings.HELD_OUT))
"""Twenty sentences with openings and links that no training has."""


def needles_in(sentence: str) -> NeedleMix:
    """Needles in every row, in one sentence."""
    return NeedleMix(sentence=sentence, num_needles=NEEDLES, value_digits=DIGITS)


def link_of(sentence: str) -> int:
    """Bytes between key and value."""
    return sentence.index("{value}") - sentence.index("{key}") - len("{key}")


class Questions(NamedTuple):
    """Rows of unseen books, one of each book, that state needles and ask for them in a sentence."""

    tokens: np.ndarray
    """`[books, length + 1]` int32."""
    answers: np.ndarray
    """`[books, needles]`, where the first digits of the answers are in `tokens`."""
    stated: np.ndarray
    """`[books, needles]`, where the first digits of the statements are."""


def questions(
    books: Sequence[bytes], sentence: str, *, number: int, of: int, seed: int, length: int = LENGTH
) -> Questions:
    """Questions in one sentence.

    Args:
      books: unseen, each longer than a row.
      sentence: with `{key}` and `{value}`.
      number: of the sentence among `of` of them; each takes another part of a book.
      of: sentences that are asked.
      seed: of keys, numbers and places.
      length: of a row.

    Raises:
      ValueError: a book is shorter than a row.
    """
    mix, pattern, rows = needles_in(sentence), _pattern(sentence), []
    for index, book in enumerate(books):
        if len(book) <= length:
            raise ValueError(f"Book {index} has {len(book)} bytes; a row needs {length + 1}.")
        start = number * (len(book) - length - 1) // of
        text = np.frombuffer(book[start : start + length + 1], np.uint8)
        example = {"tokens": text, "loss_weight": np.ones(length, np.float32)}
        hidden = mix.hide(example, rng=np.random.default_rng([seed, number, index]))["tokens"]
        found = pattern.finditer(hidden.astype(np.uint8).tobytes().decode("latin-1"))
        rows.append((hidden, [match.start(1) for match in found]))
    tokens, digits = (np.array(x, np.int32) for x in zip(*rows, strict=True))
    return Questions(tokens, answers=digits[:, NEEDLES:], stated=digits[:, :NEEDLES])


def _pattern(sentence: str) -> re.Pattern[str]:
    opening, link, end = re.split(r"\{key\}|\{value\}", sentence)
    opening, link, end = map(re.escape, (opening, link, end))
    return re.compile(f"{opening}[0-9a-f]{{4}}{link}([0-9]{{{DIGITS}}}){end}")


def write_repeated(source: Path, out: Path, *, seed: int) -> None:
    """Writes a file of documents with spans of their own text repeated, if it is not there.

    About a quarter of its bytes are a repetition of 32 to 96 bytes of the same document, 128 to 768
    bytes of text before.

    Args:
      source: documents, JSON Lines with `text`.
      out: of the same form.
      seed: of the spans.
    """
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    with source.open(encoding="utf-8") as documents, part.open("w", encoding="utf-8") as file:
        for number, line in enumerate(documents):
            document = json.loads(line)
            rng = np.random.default_rng([seed, number])
            document["text"] = with_repeated_spans(document["text"], rng)
            file.write(json.dumps(document) + "\n")
    part.replace(out)


def with_repeated_spans(text: str, rng: np.random.Generator) -> str:
    """The text, at every `SPAN_EVERY` characters with a span of itself repeated before a word."""
    pieces, before = [], 0
    for near in range(SPAN_DISTANCE[1] + SPAN[1], len(text), SPAN_EVERY):
        place = text.find(" ", near) + 1
        if not 0 < place < near + SPAN_EVERY:
            continue
        size, distance = (int(rng.integers(low, high + 1)) for low, high in (SPAN, SPAN_DISTANCE))
        start = place - distance - size
        pieces += [text[before:place], text[start : start + size], " "]
        before = place
    return "".join([*pieces, text[before:]])
