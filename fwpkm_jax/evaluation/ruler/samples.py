"""RULER's samples, generated at a length in tokens.

A sample is drawn from its seed, task, length and number alone. Each task has a size, such as the
sentences of its text; the largest size that fits into the length is taken.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
import string
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import zeta

from fwpkm_jax.data import Tokenizer
from fwpkm_jax.evaluation.questions.asking import Question
from fwpkm_jax.evaluation.questions.texts import sentences_of
from fwpkm_jax.evaluation.ruler import prompts
from fwpkm_jax.evaluation.ruler.documents import DocumentQuestion
from fwpkm_jax.evaluation.ruler.prompts import Needles

_DEPTHS = 40  # Places in an essay where a needle may stand.
_HOPS = 4  # Assignments after the first in a chain.
_EXAMPLE_TOKENS = 500  # Of the solved example of variable tracking.
_COMMON = 10  # Words to find in the list.
_SHORT = 4096  # Shorter lists repeat their words less often.
_WORD_LENGTH = 6  # Letters of a coded word.


class Material(NamedTuple):
    """What texts are made of.

    Attributes:
      essay: words of the text around needles, repeated where it is too short.
      words: words to draw from, none twice.
      documents: by task, questions with their documents, and all documents.
    """

    essay: Sequence[str]
    words: Sequence[str]
    documents: dict[str, tuple[Sequence[DocumentQuestion], Sequence[str]]]


class _Text(NamedTuple):
    context: str
    question: str
    references: tuple[str, ...]


Build = Callable[[int, np.random.Generator], _Text]
"""Makes the text of a size."""


def make_samples(
    task: str, *, length: int, number: int, seed: int, tokenizer: Tokenizer, material: Material
) -> list[Question]:
    """Samples of a task whose tokens and those of the answer are at most `length`.

    Args:
      task: one of `prompts.TASKS`.
      length: tokens of the prompt and of the answer.
      number: samples; of tasks with documents no more than there are questions.
      seed: of all draws.
      tokenizer: counts the tokens.
      material: what texts are made of.

    Raises:
      ValueError: not even the smallest text fits.
    """
    room = length - prompts.NEW_TOKENS[task]
    found, size = [], 0
    questions = material.documents.get(task)
    for index in range(number if questions is None else min(number, len(questions[0]))):
        build, least, most = _task(task, index, length, tokenizer, material)

        def text(size: int, index: int = index, build: Build = build) -> _Text:
            rng = np.random.default_rng([seed, prompts.TASKS.index(task), length, index])
            return build(size, rng)

        def tokens(size: int, text: Callable[[int], _Text] = text) -> int:
            made = text(size)
            return len(tokenizer.encode(made.context + made.question))

        # Found by bisection once; then samples of other words shrink by steps where they must.
        size = size or _largest(tokens, least, most, room)
        used = min(max(size, least), most)
        while used > least and tokens(used) > room:
            used = max(least, used - max(1, used // 50))
        if tokens(used) > room:
            raise ValueError(
                f"length={length} is too short for {task}: its smallest text has {tokens(used):,} "
                f"tokens and its answer {prompts.NEW_TOKENS[task]}; raise lengths."
            )
        found.append(Question(*text(used), id=f"{task}-{length}-{index}"))
    return found


def words_of(text: str) -> list[str]:
    """The words of 3 to 12 small letters in a text, sorted, none twice."""
    return sorted({word for word in re.findall(r"\b[a-z]{3,12}\b", text)})


def _largest(tokens: Callable[[int], int], least: int, most: int, room: int) -> int:
    """The largest size from `least` to `most` whose tokens fit, if tokens grow with size."""
    high = least
    while high < most and tokens(high) <= room:  # So that no text is made that is far too long.
        high = min(most, 2 * high)
    sizes = range(least, high + 1)
    return max(least, least + bisect.bisect_right(sizes, room, key=tokens) - 1)


def _task(
    task: str, index: int, length: int, tokenizer: Tokenizer, material: Material
) -> tuple[Build, int, int]:
    """How a text is made, and its smallest and largest size."""
    if task in prompts.NEEDLE_TASKS:
        spec = prompts.NEEDLE_TASKS[task]
        needles = spec.num_keys * spec.num_values
        return functools.partial(_needles, spec, material), needles, length
    if task == "vt":
        return functools.partial(_tracing, tokenizer), _HOPS + 1, length
    if task == "cwe":
        return functools.partial(_common_words, length, material.words), _COMMON, length
    if task == "fwe":
        return functools.partial(_frequent_words, length), 4, length
    questions, documents = material.documents[task]
    one = questions[index]
    return functools.partial(_documents, one, documents), len(one.own), len(documents)


# Needles.


def _value(kind: str, words: Sequence[str], rng: np.random.Generator) -> str:
    match kind:
        case "numbers":
            return str(rng.integers(10**6, 10**7))
        case "uuids":
            return str(uuid.UUID(bytes=rng.bytes(16), version=4))
        case _:
            return "-".join(words[int(n)] for n in rng.integers(len(words), size=2))


def _needles(spec: Needles, material: Material, size: int, rng: np.random.Generator) -> _Text:
    drawn = functools.partial(_value, words=material.words, rng=rng)
    keys = [drawn(spec.keys) for _ in range(spec.num_keys)]
    values = [[drawn(spec.values) for _ in range(spec.num_values)] for _ in keys]

    def needle(key: str, value: str) -> str:
        return prompts.NEEDLE.format(kind=spec.values, key=key, value=value)

    hidden = [needle(key, value) for key, own in zip(keys, values, strict=True) for value in own]
    hidden = [hidden[place] for place in rng.permutation(len(hidden))]
    if spec.haystack == "essay":
        context = _hide_in_essay(hidden, material.essay, size, rng)
    else:
        lines = [prompts.NOISE] * size
        if spec.haystack == "needle":
            lines = [needle(drawn(spec.keys), drawn(spec.values)) for _ in range(size)]
        places = sorted(rng.choice(size, len(hidden), replace=False).tolist(), reverse=True)
        for place, text in zip(places, hidden, strict=True):
            lines.insert(place, text)
        context = "\n".join(lines)
    asked = rng.choice(len(keys), spec.num_queries, replace=False).tolist()
    names = [keys[number] for number in asked]
    query = ", ".join(names[:-1]) + f", and {names[-1]}" if len(names) > 1 else names[0]
    single = spec.num_queries * spec.num_values == 1
    before, after = prompts.ONE_NEEDLE if single else prompts.NEEDLES
    kind = spec.values[:-1] if single else spec.values
    return _Text(
        before.format(kind=kind, context=context),
        after.format(kind=kind, query=query),
        tuple(value for number in asked for value in values[number]),
    )


def _hide_in_essay(
    hidden: Sequence[str], essay: Sequence[str], size: int, rng: np.random.Generator
) -> str:
    """Needles between the sentences of the first `size` words of the essay."""
    words = (list(essay) * -(-size // len(essay)))[:size]
    sentences = sentences_of(" ".join(words))
    depths = np.sort(rng.choice(_DEPTHS, len(hidden), replace=False)) / (_DEPTHS - 1)
    for depth, text in zip(depths[::-1], hidden[::-1], strict=True):
        sentences.insert(int(depth * len(sentences)), text)
    return " ".join(sentences)


# Variable tracking.


def _names(number: int, size: int, letters: str, rng: np.random.Generator) -> list[str]:
    """Different names of `size` letters."""
    names: dict[str, None] = {}
    while len(names) < number:
        drawn = rng.integers(len(letters), size=size)
        names["".join(letters[int(n)] for n in drawn)] = None
    return list(names)


def _chain(size: int, letters: int, rng: np.random.Generator) -> _Text:
    names = _names(_HOPS + 1, letters, string.ascii_uppercase, rng)
    value = str(rng.integers(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(names)]
    lines = [prompts.NOISE] * size
    for order, place in enumerate(np.sort(rng.choice(size, len(chain), replace=False)).tolist()):
        lines.insert(place + order, chain[order])
    before, after = prompts.TRACING
    return _Text(
        before.format(context="\n".join(lines).replace(". \n", ".\n")),
        after.format(query=value, number=_HOPS + 1),
        tuple(names),
    )


def _tracing(tokenizer: Tokenizer, size: int, rng: np.random.Generator) -> _Text:
    """A solved example of at most 500 tokens, if one is so short, then the chain to find."""
    example_seed = int(rng.integers(2**31))

    def example(size: int) -> str:
        made = _chain(size, 3, np.random.default_rng(example_seed))
        return f"{made.context}{made.question} {' '.join(made.references)}\n"

    def tokens(size: int) -> int:
        return len(tokenizer.encode(example(size)))

    shot = example(_largest(tokens, _HOPS + 1, 40, _EXAMPLE_TOKENS))
    made = _chain(size, 5, rng)
    return made._replace(context=f"{shot}\n{made.context}")


# Words by their frequency.


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _list(
    words: Sequence[str], number: int, repeats: tuple[int, int], rng: np.random.Generator
) -> _Text:
    """A list in which 10 of `number` words stand `repeats[0]` times, the others `repeats[1]`."""
    if number <= len(words):
        drawn = [words[int(n)] for n in rng.choice(len(words), number, replace=False)]
    else:  # Pairs of words, where there are not enough of them.
        pairs = rng.choice(len(words) ** 2, number, replace=False)
        drawn = [f"{words[pair // len(words)]}-{words[pair % len(words)]}" for pair in pairs]
    common, others = drawn[:_COMMON], drawn[_COMMON:]
    whole = common * repeats[0] + others * repeats[1]
    before, after = prompts.COMMON_WORDS
    ordered = [whole[place] for place in rng.permutation(len(whole))]
    return _Text(before.format(context=_numbered(ordered)), after, tuple(common))


def _common_words(length: int, words: Sequence[str], size: int, rng: np.random.Generator) -> _Text:
    short = length < _SHORT
    example = _list(words, *((20, (3, 1)) if short else (40, (10, 3))), rng)
    shot = f"{example.context}{example.question} {_numbered(example.references)}\n"
    made = _list(words, size, (6, 1) if short else (30, 3), rng)
    return made._replace(context=shot + made.context)


def _frequent_words(length: int, size: int, rng: np.random.Generator) -> _Text:
    """Coded words with frequencies as 1 / rank**2; the most frequent is a run of dots."""
    number = max(4, (length - prompts.NEW_TOKENS["fwe"]) // 50)
    coded = _names(number, _WORD_LENGTH, string.ascii_lowercase, rng)
    names = ["...", *coded[1:]]
    counts = (size * np.arange(1, number + 1, dtype=np.float64) ** -2 / zeta(2)).astype(int)
    whole = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    before, after = prompts.FREQUENT_WORDS
    ordered = [whole[place] for place in rng.permutation(len(whole))]
    return _Text(before.format(context=" ".join(ordered)), after, tuple(names[1:4]))


# Questions about documents.


def _documents(
    one: DocumentQuestion, documents: Sequence[str], size: int, rng: np.random.Generator
) -> _Text:
    """The question's documents among others, those of the same article first."""
    chosen = list(one.own)
    near = [number for number in one.near if number not in chosen]
    chosen += rng.permutation(near)[: size - len(chosen)].tolist()
    if len(chosen) < size:
        rest = np.setdiff1d(np.arange(len(documents)), chosen)
        chosen += rng.choice(rest, size - len(chosen), replace=False).tolist()
    ordered = [documents[chosen[place]] for place in rng.permutation(len(chosen))]
    context = "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(ordered, 1))
    before, after = prompts.DOCUMENTS
    return _Text(before.format(context=context), after.format(query=one.query), one.answers)
