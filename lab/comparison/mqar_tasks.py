"""Documents of multi-query associative recall, as Zoology sets the task (arXiv:2312.04927).

A document states pairs of a key and a value, then asks for the value of every key once. Keys are
ids below half of the vocabulary, values those above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Split = Literal["train", "valid", "test"]
Setting = Literal["cell", "mixed", "stacked", "reassigned"]
"""cell: one number of pairs and one length. mixed: trained on 4 to 64 pairs, tested on up to 256.
stacked: key and value of a pair share a position. reassigned: some keys get a new value, and the
last one counts."""

_STREAMS: Mapping[Split, int] = {"train": 0, "valid": 1, "test": 2}
_POWER = 0.01


@dataclass(frozen=True, kw_only=True)
class Task:
    """Documents of one shape."""

    pairs: int
    """Keys of a document; each is asked for once."""
    length: int
    """Tokens of a document."""
    updates: int = 0
    """Keys that are stated a second time, with another value."""
    random_filler: bool = False
    """Fills the places between questions with random ids; off: with id 0."""
    stacked: bool = False
    """Documents of `2 * pairs` positions: key and value side by side, then keys alone."""
    vocabulary: int = 8192
    """Number of ids."""

    def __post_init__(self):
        stated = self.pairs + self.updates
        needed = 2 * self.pairs if self.stacked else 2 * stated + 2 * self.pairs
        if self.length < needed:
            raise ValueError(
                f"length={self.length} is too short for pairs={self.pairs} and "
                f"updates={self.updates}; it must be at least {needed}."
            )
        if self.updates > self.pairs or self.pairs >= self.vocabulary // 2:
            raise ValueError(
                f"pairs={self.pairs} must be at least updates={self.updates} and below half of "
                f"vocabulary={self.vocabulary}."
            )


class Documents(NamedTuple):
    """Documents of one task.

    Attributes:
      tokens: int32 `[documents, length]`; of a stacked task `[documents, length, 2]`, the ids of a
        key and of its value, the latter -1 in a question.
      positions: int32 `[documents, pairs]`, where the questions are.
      labels: int32 `[documents, pairs]`, the ids of the values that answer them.
    """

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


class Part(NamedTuple):
    """A number of documents of one task."""

    task: Task
    documents: int


class Cell(NamedTuple):
    """What a setting trains on, is tested on, and the published way to train it.

    Attributes:
      train: parts of an epoch, in this order.
      test: parts of the test; the validation has the same.
      batch_size: documents per update.
      epochs: passes over the training documents.
      rates: learning rates to choose from.
    """

    train: tuple[Part, ...]
    test: tuple[Part, ...]
    batch_size: int
    epochs: int
    rates: tuple[float, ...]


def cell_of(setting: Setting, *, pairs: int, length: int) -> Cell:
    """The published numbers of a setting; `pairs` and `length` are those of `cell`.

    References: configurations `iclr24_zoology_figure2`, `original_mqar_configs`,
    `mqar_continuous` and `forgetting_configs` of HazyResearch/zoology.
    """
    if setting == "cell":
        one = Task(pairs=pairs, length=length)
        batch_size = {256: 256, 512: 128, 1024: 64}.get(length, 512)
        rates = np.logspace(-4, -2, 4)
        train, test, epochs = (Part(one, 100_000),), (Part(one, 3_000),), 64
    else:
        counts = (4, 9, 16, 25, 36) if setting == "reassigned" else (4, 8, 16, 32, 64)
        lengths = (64, 128, 256, 256, 256)
        tested = {4: 64, 8: 64, 16: 64, 32: 128, 64: 256, 128: 512, 256: 1024}
        if setting == "reassigned":
            tested = {4: 64, 9: 64, 16: 128, 36: 256, 64: 512, 144: 1024, 256: 2048}

        def task(pairs: int, length: int) -> Task:
            if setting == "stacked":
                return Task(pairs=pairs, length=2 * pairs, stacked=True)
            updates = 4 if setting == "reassigned" else 0
            return Task(pairs=pairs, length=length, updates=updates, random_filler=True)

        sizes = zip(counts, lengths, (100_000, *[20_000] * 4), strict=True)
        train = tuple(Part(task(n, tokens), documents) for n, tokens, documents in sizes)
        test = tuple(Part(task(*one), 1_000) for one in tested.items())
        batch_size, rates, epochs = 256, np.logspace(-3, -1.5, 4), 32
    return Cell(train, test, batch_size, epochs, tuple(float(f"{rate:.3g}") for rate in rates))


def documents(task: Task, count: int, *, split: Split, seed: int) -> Documents:
    """That many documents, a function of the task, the split and the seed alone."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAMS[split],)))
    half = task.vocabulary // 2
    keys = distinct(rng, count, task.pairs, 1, half)
    values = distinct(rng, count, task.pairs, half, task.vocabulary)
    if task.stacked:
        order = _orders(rng, count, task.pairs)
        asked, answers = (np.take_along_axis(x, order, axis=1) for x in (keys, values))
        stated = np.stack([keys, values], axis=-1)
        questions = np.stack([asked, np.full_like(asked, -1)], axis=-1)
        places = np.arange(task.pairs, 2 * task.pairs, dtype=np.int32)
        positions = np.broadcast_to(places, (count, task.pairs))
        return Documents(np.concatenate([stated, questions], axis=1), positions, answers)
    context = 2 * (task.pairs + task.updates)
    tokens = np.zeros((count, task.length), np.int32)
    tokens[:, 0 : 2 * task.pairs : 2] = keys
    tokens[:, 1 : 2 * task.pairs : 2] = values
    final = values.copy()
    if task.updates:
        changed = _orders(rng, count, task.pairs)[:, : task.updates]
        old = np.take_along_axis(values, changed, axis=1)
        new = rng.integers(half, task.vocabulary - 1, changed.shape, np.int32)
        new += new >= old  # Any value but the old one.
        np.put_along_axis(final, changed, new, axis=1)
        again = slice(2 * task.pairs, context, 2)
        tokens[:, again] = np.take_along_axis(keys, changed, axis=1)
        tokens[:, again.start + 1 : context : 2] = new
    gaps = _gaps(rng, count, task.pairs, (task.length - context) // 2)
    positions = context + 2 * gaps
    np.put_along_axis(tokens, positions, keys, axis=1)
    if task.random_filler:
        random = rng.integers(task.vocabulary, size=tokens.shape, dtype=np.int32)
        tokens = np.where(tokens == 0, random, tokens)
    return Documents(tokens, positions.astype(np.int32), final)


def distinct(rng: np.random.Generator, rows: int, count: int, low: int, high: int) -> np.ndarray:
    """int32 `[rows, count]` from `low` to `high - 1`, uniform, no number twice in a row."""
    drawn = np.empty((rows, count), np.int32)
    for column in range(count):
        new = rng.integers(low, high, rows, np.int32)
        while (twice := (drawn[:, :column] == new[:, None]).any(axis=1)).any():
            new[twice] = rng.integers(low, high, int(twice.sum()), np.int32)
        drawn[:, column] = new
    return drawn


def _orders(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    return np.argsort(rng.random((rows, count)), axis=1)


def _gaps(rng: np.random.Generator, rows: int, count: int, space: int) -> np.ndarray:
    """`[rows, count]` different gaps below `space`, drawn one after the other by a power law.

    The largest sums of log-probability and Gumbel noise are such a draw.
    """
    weights = np.arange(1, space + 1) ** (_POWER - 1)
    noise = rng.gumbel(size=(rows, space))
    return np.argsort(-(np.log(weights) + noise), axis=1)[:, :count]
