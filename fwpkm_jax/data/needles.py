"""Hides needles in training text: numbers that are asked for beyond any attention window."""

import string
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fwpkm_jax.literals import Count, NotNegative, Positive, Share, ShareAboveZero, check_fields

Example = dict[str, np.ndarray]

SENTENCE = "The secret number for ID-{key} is {value}."
"""The sentence of the paper's needle evaluation (arXiv:2601.00671, section 4.3)."""
_SHORTEST_NAME = 3
_OPENING, _LINK = 16, 24  # Bytes before the key of a drawn sentence, and between key and value.
_SPACES = bytes.maketrans(b"\r\n\t", b"   ")
_DELETED = bytes(x for x in range(256) if not (chr(x).isalpha() or chr(x) in " ,\r\n\t") or x > 127)
_HEX = "0123456789abcdef"
_WORD_ENDS = tuple(b" \n")


def needle_question(key: str) -> str:
    """The text before a needle's number, including the space before the first digit."""
    return SENTENCE.partition("{value}")[0].format(key=key)


def needle_sentence(key: str, value: str) -> str:
    """The sentence that states a needle."""
    return SENTENCE.format(key=key, value=value)


def random_key(rng: np.random.Generator, characters: int) -> str:
    """Uniformly random hexadecimal characters."""
    return "".join(_HEX[i] for i in rng.integers(16, size=characters))


def random_name(rng: np.random.Generator, most: int) -> str:
    """Uniformly random letters, three to `most` of them, the first one a capital."""
    size = rng.integers(_SHORTEST_NAME, most + 1)
    letters = rng.choice(list(string.ascii_lowercase), size=size)
    return "".join(letters).capitalize()


def random_value(rng: np.random.Generator, digits: int) -> str:
    """Uniformly random decimal digits."""
    return "".join(map(str, rng.integers(10, size=digits)))


@dataclass(frozen=True, kw_only=True)
class NeedleMix:
    """Needles hidden in rows of bytes.

    Each needle's sentence stands twice in a row: among the words of its first part, and again, in
    another order, among those of its last part, where its digits are answers. Keys and values are
    drawn anew for every row, so slow weights can learn how to look a number up but not the number
    itself.
    """

    share: ShareAboveZero = 1.0
    """Share of the rows with needles; each row is drawn independently."""
    num_needles: Count = 4
    """Needles per row."""
    sentence: str = SENTENCE
    """The sentence, with `{key}` and behind it `{value}`; by default that of the paper's needle
    evaluation (arXiv:2601.00671, section 4.3), which `fwpkm eval --suite needle` asks."""
    other_sentences: tuple[str, ...] = ()
    """More sentences: each row with needles states and asks in one of `sentence` and these, drawn
    uniformly. All needles of a row have the same one, so only the key tells them apart."""
    drawn_share: Share = 0.0
    """Share of the rows with needles whose sentence is drawn: words of the row's own text stand
    before the key, and between key and value. No wording comes twice, so that a model learns to
    look up in any words, if the question has those of the statement."""
    keys: Literal["hex", "names"] = "hex"
    """hex: `key_characters` hexadecimal characters. names: three to `key_characters` letters, the
    first one a capital."""
    key_characters: Count = 4
    """Characters of a key; with `keys="names"` the most that it has."""
    value_digits: Count = 6
    """Digits of a number."""
    min_distance: Count = 128
    """Least distance in bytes from a stated digit to the answer that repeats it. A stack of
    sliding windows reaches layers * (window - 1) bytes back; stay beyond that, and beyond the
    memory's chunk."""
    answer_weight: Positive = 1.0
    """Weight in the training loss of a digit that is an answer; the text around has 1."""
    sentence_weight: NotNegative = 1.0
    """Weight of all other bytes of the sentences. 0: a model learns to answer, but not to expect
    such sentences in text; for a memory in a trained model."""

    def __post_init__(self) -> None:
        check_fields(self)
        for sentence in self._sentences:
            _check_sentence(sentence)
        least = _SHORTEST_NAME if self.keys == "names" else 1
        if self.key_characters < least:
            raise ValueError(
                f"key_characters={self.key_characters} gives no names; use {least} or more."
            )
        # Names of three letters alone are 26**3 already; 16**8 exceeds any number of needles, and
        # the power of a huge length would take too long.
        size = 26 if self.keys == "names" else 16
        if self.num_needles > size ** min(self.key_characters, 8):
            raise ValueError(
                f"key_characters={self.key_characters} gives {size**self.key_characters} keys, too "
                f"few for num_needles={self.num_needles} in a row; raise it."
            )

    @property
    def least_length(self) -> int:
        """Labels that a row needs to hold every sentence twice, `min_distance` apart."""
        sentences = [_Words.of(words) for words in self._sentences]
        if self.drawn_share:
            sentences.append(_Words(b"x" * (_OPENING + 1), b"x" * (_LINK + 2), b"."))
        return max(
            2 * self.num_needles * self._size(words) + self._gap(words) - 1 for words in sentences
        )

    def hide(self, example: Example, *, rng: np.random.Generator) -> Example:
        """A row of text with needles, or the row itself in the share of rows without.

        Args:
          example: `tokens` `[length + 1]`, bytes, `length` at least `least_length`, and
            `loss_weight` `[length]`. What the needles push off the end of the row is dropped.
          rng: of this row.

        Returns:
          The same arrays with needles; `loss_weight` is `answer_weight` at the answers and
          `sentence_weight` at the sentences' other bytes. `answer_distance` `[length]` is at each
          answer the distance back to the digit that it repeats, elsewhere 0.
        """
        if rng.random() >= self.share:
            return example | {"answer_distance": np.zeros(len(example["loss_weight"]), np.int32)}
        text, total = example["tokens"], len(example["tokens"])
        words = self._draw_words(rng, text)
        needles = self.draw(rng)
        text = text[: total - 2 * sum(len(words.stated(*needle)) for needle in needles)]
        # Between the parts lies text that keeps the last statement and the first question apart.
        gap = self._gap(words)
        first_end = (len(text) - gap) // 2
        last_start = first_end + gap
        places = np.concatenate(
            [
                _word_starts(rng, text, 0, first_end, size=self.num_needles),
                _word_starts(rng, text, last_start, len(text), size=self.num_needles),
            ]
        )
        order = np.concatenate(
            [rng.permutation(self.num_needles), rng.permutation(self.num_needles)]
        )
        tokens, weights, distances, at, written = [], [], [], 0, 0
        told: dict[int, int] = {}
        for number, (place, needle) in enumerate(zip(places, order, strict=True)):
            key, value = needles[needle]
            sentence = np.frombuffer(words.stated(key, value), np.uint8)
            weight = np.full(len(sentence), self.sentence_weight, np.float32)
            distance = np.zeros(len(sentence), np.int32)
            start = len(words.question(key))
            digits = written + place - at + start
            if number < self.num_needles:
                told[needle] = digits
            else:
                weight[start : start + self.value_digits] = self.answer_weight
                distance[start : start + self.value_digits] = digits - told[needle]
            tokens += [text[at:place], sentence]
            weights += [np.ones(place - at, np.float32), weight]
            distances += [np.zeros(place - at, np.int32), distance]
            written += place - at + len(sentence)
            at = place
        tokens.append(text[at:])
        weights.append(np.ones(len(text) - at, np.float32))
        distances.append(np.zeros(len(text) - at, np.int32))
        return {
            "tokens": np.concatenate(tokens).astype(np.int32),
            "loss_weight": np.concatenate(weights)[1:] * example["loss_weight"],
            "answer_distance": np.concatenate(distances)[1:],
        }

    def _draw_words(self, rng: np.random.Generator, text: np.ndarray) -> "_Words":
        """The sentence of a row."""
        if self.drawn_share and rng.random() < self.drawn_share:
            opening = _some_words(rng, text, _OPENING)
            link = _some_words(rng, text, _LINK)
            return _Words(opening[:1].upper() + opening[1:] + b" ", b" " + link + b" ", b".")
        if not self.other_sentences:
            return _Words.of(self.sentence)
        return _Words.of(self._sentences[rng.integers(len(self._sentences))])

    @property
    def _sentences(self) -> tuple[str, ...]:
        return self.sentence, *self.other_sentences

    def _size(self, words: "_Words") -> int:
        """Bytes of a sentence with the longest key, and the space after it."""
        return len(words.stated("0" * self.key_characters, "0" * self.value_digits))

    def _gap(self, words: "_Words") -> int:
        # The same digit of the last statement and the first question: one sentence is between.
        return max(self.min_distance - self._size(words), 0)

    def draw(self, rng: np.random.Generator) -> list[tuple[str, str]]:
        """Keys, all of them different, and values of one row."""
        draw_key = random_name if self.keys == "names" else random_key
        needles: dict[str, str] = {}
        while len(needles) < self.num_needles:
            key = draw_key(rng, self.key_characters)
            needles[key] = random_value(rng, self.value_digits)
        return list(needles.items())


class _Words(NamedTuple):
    """A sentence of needles, around key and value."""

    opening: bytes
    link: bytes
    end: bytes

    @classmethod
    def of(cls, sentence: str) -> "_Words":
        opening, rest = sentence.format(key="\0", value="\1").split("\0")
        return cls(opening.encode(), *(part.encode() for part in rest.split("\1")))

    def question(self, key: str) -> bytes:
        """The sentence up to the value."""
        return self.opening + key.encode() + self.link

    def stated(self, key: str, value: str) -> bytes:
        """The sentence that states a needle, and a space."""
        return self.question(key) + value.encode() + self.end + b" "


def _some_words(rng: np.random.Generator, text: np.ndarray, most: int) -> bytes:
    """Whole words of a text, without digits and marks, in at most `most` bytes."""
    kept = bytes(text.astype(np.uint8)).translate(_SPACES, delete=_DELETED)
    size = int(rng.integers(most // 4, most + 1))
    starts = np.flatnonzero(np.frombuffer(kept, np.uint8) == ord(" "))
    starts = starts[starts < len(kept) - most - 1]
    start = int(rng.choice(starts)) + 1 if len(starts) else 0
    *words, last = kept[start : start + size].split(b" ")
    return b" ".join(word for word in words if word) or last or b"is"


def _check_sentence(sentence: str) -> None:
    """Raises a ValueError for a sentence that states no key with a value behind it."""
    try:
        fields = [field for _, *field in string.Formatter().parse(sentence) if field[0] is not None]
    except ValueError:
        fields = []
    if fields != [["key", "", None], ["value", "", None]]:
        raise ValueError(
            f"sentence={sentence!r} must hold {{key}} and behind it {{value}}, once each, as "
            f"{SENTENCE!r} does."
        )


def _word_starts(
    rng: np.random.Generator, text: np.ndarray, start: int, end: int, *, size: int
) -> np.ndarray:
    """Sorted positions in `[start, end]` of the text: its start, or after a space or line break."""
    ends = np.flatnonzero(np.isin(text[start:end], _WORD_ENDS))
    return np.sort(rng.choice(np.concatenate([[start], start + ends + 1]), size=size))
