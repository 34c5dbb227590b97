"""Needle samples: sentences with a secret number, hidden in consecutive pieces of a text."""

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fwpkm_jax.data import needle_question, needle_sentence, random_key, random_value
from fwpkm_jax.evaluation.needle.config import NeedleConfig, SampleSettings

logger = logging.getLogger(__name__)


class Needle(NamedTuple):
    """One hidden fact."""

    key: str
    value: str
    depth: float
    """Its position in percent of the haystack."""
    word_index: int
    """Index of the word of the unmodified text that it is inserted before."""

    @property
    def sentence(self) -> str:
        return needle_sentence(self.key, self.value)


class NeedleSample(NamedTuple):
    """A haystack with its needles and the question about one of them."""

    haystack: str
    """Words joined by single spaces, needles included."""
    question: str
    """The question with a leading and a trailing space; the answer follows it."""
    answer: str
    needles: tuple[Needle, ...]
    target: int
    """Index of the needle that is asked for."""
    document: str
    """Id of the text."""
    words: int
    """Words of the unmodified text; at least half of the requested number."""

    @property
    def depth(self) -> float:
        """Depth of the target, in percent."""
        return self.needles[self.target].depth


def build_samples(
    texts: Iterable[tuple[str, str]], settings: SampleSettings, *, words: int, seed: int
) -> Iterator[NeedleSample]:
    """Samples from texts in order; keys are unique over all samples.

    Args:
      words: whitespace words of a haystack. Haystacks are consecutive pieces of a text and do not
        overlap; a piece with fewer than half of these words is skipped.
      seed: seed of keys, values, depths and targets; it determines the samples.

    Raises:
      ValueError: `words` is out of range, or the keys run out.

    References: Zhao and Jones 2026, arXiv:2601.00671, section 4.3.
    """
    if words < 1:
        raise ValueError(f"words={words} must be at least 1.")
    num_needles, key_characters = settings.num_needles, settings.key_characters
    depths = settings.depths
    rng = np.random.default_rng(seed)
    used: set[str] = set()
    number = 0
    for document, text in texts:
        all_words = text.split()
        for start in range(0, len(all_words), words):
            cut = all_words[start : start + words]
            if 2 * len(cut) < words:
                continue
            if len(used) + num_needles > 16**key_characters:
                raise ValueError(
                    f"key_characters={key_characters} gives {16**key_characters} keys, too few "
                    f"for {num_needles} needles in each of {number + 1} samples; raise it or ask "
                    "for fewer samples."
                )
            keys = [_new_key(rng, used, key_characters) for _ in range(num_needles)]
            values = [random_value(rng, settings.value_digits) for _ in keys]
            places = rng.random(num_needles)
            target = int(rng.integers(num_needles))
            if depths:
                places[target] = depths[number % len(depths)] / 100
            needles = tuple(
                Needle(key, value, 100 * float(place), int(place * len(cut)))
                for key, value, place in zip(keys, values, places, strict=True)
            )
            yield NeedleSample(
                haystack=_hide(cut, needles),
                question=f" {needle_question(keys[target])}",
                answer=values[target],
                needles=needles,
                target=target,
                document=document,
                words=len(cut),
            )
            number += 1


def take_samples(
    texts: Iterable[tuple[str, str]], config: NeedleConfig, *, words: int, seed: int
) -> list[NeedleSample]:
    """The samples of one length; logs a warning if there are fewer than `config.samples`.

    Raises:
      ValueError: no text is long enough for a sample.
    """
    built = build_samples(texts, config.settings, words=words, seed=seed)
    samples = list(itertools.islice(built, config.samples))
    if not samples:
        raise ValueError(
            f"No text has the {-(-words // 2)} words that a haystack of {words} needs at least; "
            "lower haystack_words or give longer texts."
        )
    if len(samples) < config.samples:
        logger.warning("The text gives %d haystacks of %d words.", len(samples), words)
    return samples


def _new_key(rng: np.random.Generator, used: set[str], length: int) -> str:
    while True:
        key = random_key(rng, length)
        if key not in used:
            used.add(key)
            return key


def _hide(words: Sequence[str], needles: Sequence[Needle]) -> str:
    """The text with each needle inserted before its word; indices count words without needles."""
    hidden = list(words)
    for needle in sorted(needles, key=lambda needle: needle.depth, reverse=True):
        hidden.insert(needle.word_index, needle.sentence)
    return " ".join(hidden)
