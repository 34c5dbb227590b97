"""Texts that state values at every depth, and questions about them, from a run's own data."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fwpkm_jax.data import (
    AbstractDataConfig,
    NeedleMix,
    RecallData,
    TextData,
    Tokenizer,
    load_tokenizer,
)
from fwpkm_jax.evaluation.sources import text_sources, texts_of


class Question(NamedTuple):
    """A question about one text.

    Attributes:
      tokens: of the question.
      answer: tokens of the value.
      stated: position in the text of the value's first token.
    """

    tokens: np.ndarray
    answer: np.ndarray
    stated: int


class Questions(NamedTuple):
    """Texts of one length, and as many questions about each.

    Attributes:
      texts: `[texts, length]`, in which every value is stated once.
      others: the same with other values.
      questions: by text.
      first_tokens: ids that a value can begin with.
      chance: probability that a guess of a value is exact.
    """

    texts: np.ndarray
    others: np.ndarray
    questions: list[list[Question]]
    first_tokens: np.ndarray
    chance: float


def questions_of(
    data: AbstractDataConfig | None, *, texts: int, length: int | None, seed: int
) -> Questions:
    """Questions as the run's training asks them; in text without needles, the paper's sentence.

    Args:
      data: of the run; None: unknown.
      texts: how many.
      length: tokens of each; None: twice that of a training row of text, or a row of facts.
      seed: of texts and questions.

    Raises:
      ValueError: the data state no facts, or too little text is there.
    """
    if data is None:
        raise ValueError("no data are known that say what the model can be asked.")
    if isinstance(data, RecallData):
        return _facts(data, texts=texts, length=length or data.length, seed=seed)
    if data.text is not None:
        text = data.text
        return _needles(text, texts=texts, length=length or 2 * text.length, seed=seed)
    raise ValueError(
        f"{type(data).__name__} states no facts that can be asked for; RecallData and text do."
    )


def _depths(rng: np.random.Generator, count: int) -> np.ndarray:
    """Increasing depths in [0, 1), one in each of `count` equal parts of the text."""
    return (np.arange(count) + rng.random(count)) / count


def _facts(data: RecallData, *, texts: int, length: int, seed: int) -> Questions:
    """Facts among filler, spread over the whole text; every one is asked for."""
    if length < 2 * data.num_facts:
        raise ValueError(
            f"length={length} cannot hold {data.num_facts} facts; use {2 * data.num_facts} or more."
        )
    rows = np.zeros((2, texts, length), np.int32)
    questions = []
    for number in range(texts):
        rng = np.random.default_rng([seed, number])
        row = rng.integers(data.num_filler, size=length)
        keys = data.first_key + rng.permutation(data.num_keys)[: data.num_facts]
        values = rng.integers(data.num_values, size=data.num_facts)
        # Of the other text each value is another one.
        others = (values + rng.integers(1, data.num_values, size=data.num_facts)) % data.num_values
        # Shrunk to one token each, so that no two facts overlap.
        places = np.floor(_depths(rng, data.num_facts) * (length - 2 * data.num_facts)).astype(int)
        places += 2 * np.arange(data.num_facts)
        row[places] = keys
        for text, chosen in zip(rows, (values, others), strict=True):
            text[number] = row
            text[number, places + 1] = data.first_value + chosen
        questions.append(
            [
                Question(np.array([key]), np.array([data.first_value + value]), int(place) + 1)
                for key, value, place in zip(keys, values, places, strict=True)
            ]
        )
    return Questions(
        rows[0],
        rows[1],
        questions,
        first_tokens=data.first_value + np.arange(data.num_values),
        chance=1 / data.num_values,
    )


def _needles(data: TextData, *, texts: int, length: int, seed: int) -> Questions:
    """Sentences with numbers among the words of validation text, in training's own form."""
    tokenizer = load_tokenizer(data.tokenizer)
    mix = data.needles or NeedleMix()
    rows: list[list[np.ndarray]] = [[], []]
    questions = []
    cuts = _cuts(data, tokenizer, length)
    for number, words in enumerate(itertools.islice(cuts, texts)):
        rng = np.random.default_rng([seed, number])
        keys, values = zip(*mix.draw(rng), strict=True)
        # The first digit differs, too.
        others = [str((int(value[0]) + rng.integers(1, 10)) % 10) + value[1:] for value in values]
        depths = _depths(rng, len(keys))
        found = [_hidden(words, mix, keys, chosen, depths) for chosen in (values, others)]
        for texts_of_kind, (text, _) in zip(rows, found, strict=True):
            texts_of_kind.append(tokenizer.encode(text)[:length].astype(np.int32))
        text, places = found[0]
        asked = []
        for key, value, place in zip(keys, values, places, strict=True):
            question = f" {_before_value(mix, key)}"
            whole = tokenizer.encode(question + value)
            stated = len(tokenizer.encode(text[:place]))
            if tokenizer.decode(whole[-len(value) :]) != value:
                raise ValueError(
                    f"tokenizer={data.tokenizer!r} does not make one token of each digit of "
                    f"{value}; answers cannot be read token by token."
                )
            asked.append(Question(whole[: -len(value)], whole[-len(value) :], stated))
        questions.append(asked)
    if not questions:
        raise ValueError(f"The validation text has no {length:,} tokens in a row.")
    shortest = min(len(row) for kind in rows for row in kind)
    stacked = [np.stack([row[:shortest] for row in kind]) for kind in rows]
    digits = [int(tokenizer.encode(f" {digit}")[-1]) for digit in "0123456789"]
    return Questions(
        stacked[0],
        stacked[1],
        questions,
        first_tokens=np.array(digits),
        chance=0.1**mix.value_digits,
    )


def _cuts(data: TextData, tokenizer: Tokenizer, length: int) -> Iterator[Sequence[str]]:
    """Words of consecutive pieces of the validation text, of about `length` tokens each."""
    for _, text in texts_of(text_sources(data), tokenizer):
        words = text.split()
        sample = " ".join(words[:1000])
        per_word = len(tokenizer.encode(sample)) / max(1, len(words[:1000]))
        size = max(1, int(length / per_word))
        for start in range(0, len(words) - size + 1, size):
            yield words[start : start + size]


def _before_value(mix: NeedleMix, key: str) -> str:
    """A needle's sentence up to its value, which is also the question."""
    return mix.sentence.partition("{value}")[0].format(key=key)


def _hidden(
    words: Sequence[str],
    mix: NeedleMix,
    keys: Sequence[str],
    values: Sequence[str],
    depths: np.ndarray,
) -> tuple[str, list[int]]:
    """The text with a sentence for each key, and where the values begin, in characters."""
    text, places, start = "", [], 0
    for key, value, depth in zip(keys, values, depths, strict=True):
        end = int(depth * len(words))
        text += "".join(f"{word} " for word in words[start:end])
        places.append(len(text) + len(_before_value(mix, key)))
        text += f"{mix.sentence.format(key=key, value=value)} "
        start = end
    return text + " ".join(words[start:]), places
