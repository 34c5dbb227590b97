"""What the trained variants read: unseen books, needles behind long texts, and their gates."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lab.study.real_size import text
from lab.study.real_size.programs import QUESTIONS, Programs, Reading
from lab.study.real_size.sizes import Size
from lab.study.real_size.training import Write
from lab.study.real_size.wordings import HELD_OUT, TRAINED

RARITIES = (1, 10, 100, 1000)
"""Edges of how often training has a byte with the two before it: below the first, and so on."""
GATE_ROWS = 8
"""Rows of each book whose gates are counted."""
WORDS: dict[str, dict[str, Any]] = {
    "held out": {"wordings": HELD_OUT},
    "held out, asked otherwise": {"wordings": HELD_OUT, "other_question": True},
    "trained": {"wordings": TRAINED},
}
"""Options of `text.haystacks` by what a line calls the words."""


class Trained(NamedTuple):
    """A variant after training."""

    programs: Programs
    params: Any
    memory: Any

    @property
    def has_memory(self) -> bool:
        return bool(self.memory)

    def ways(self) -> tuple[str, ...]:
        """How it can read, the way that training reads first.

        With a memory: written, frozen, or without what the memory holds. Without one the mixers'
        state starts anew in every row, as in training, or is carried from row to row.
        """
        return ("written", "frozen", "no reads") if self.has_memory else ("rows", "carried")

    def start(self, way: str) -> Any:
        """The memory before a text: as training left it, or with slots of zero; or a stream."""
        if way == "carried":
            return self.programs.stream(self.params)
        if way != "no reads":
            return self.memory
        return {
            layer: one._replace(values=jnp.zeros_like(one.values))
            for layer, one in self.memory.items()
        }

    def read(self, memory: Any, tokens: np.ndarray, way: str) -> tuple[Reading, Any]:
        """What it says of a piece, and the memory behind it."""
        piece = jax.device_put(tokens)
        if way == "carried":
            return self.programs.carry(self.params, memory, piece)
        if way in ("written", "rows"):
            return self.programs.read(self.params, memory, piece)
        return self.programs.read_frozen(self.params, memory, piece), memory

    def answer(self, memory: Any, asked: np.ndarray, way: str) -> Reading:
        """What it says of questions, a fixed number for each memory, which stays as it is."""
        ask = self.programs.ask_carried if way == "carried" else self.programs.ask
        return ask(self.params, memory, jax.device_put(asked))


def read_unseen(
    variants: dict[str, Trained],
    books: Sequence[bytes],
    size: Size,
    *,
    rows: int,
    until: float,
    write: Write,
    counts: np.ndarray | None = None,
) -> None:
    """Losses of unseen books by section, a line for each variant and way of reading.

    A batch of books is read in every way before the next one, so that the lines hold the same
    books when time runs out.

    Args:
      variants: by name.
      books: a batch of which is read side by side, each by a memory of its own that starts as
        training left it.
      size: of rows and batch.
      rows: of each book that are read, at most.
      until: `time.monotonic()` after which no batch starts.
      write: gets the lines.
      counts: from `trigram_counts`; None: no lines of gates.
    """
    asked = [(name, way) for name, variant in variants.items() for way in variant.ways()]
    losses: dict[tuple[str, str], list[list[float | None]]] = {one: [] for one in asked}
    gates: dict[str, list[Any]] = {name: [] for name, one in variants.items() if one.has_memory}
    began = time.monotonic()
    edges = [0, *(end for end in size.sections if end < rows), rows]
    for tokens, lengths in book_batches(books, size, rows=rows):
        if losses[asked[0]] and time.monotonic() > until:
            break
        for name, way in asked:
            variant = variants[name]
            memory, found = variant.start(way), []
            for piece in text.rows_of(tokens, size.length):
                reading, memory = variant.read(memory, piece, way)
                found.append((reading.nats, reading.gates if len(found) < GATE_ROWS else None))
            found = jax.device_get(found)
            nats = np.stack([one for one, _ in found], axis=1)  # [batch, rows, length]
            for place, length in enumerate(lengths):
                losses[name, way].append(section_means(nats[place, :length], edges))
            if counts is not None and way == "written" and name in gates:
                kept = np.concatenate([gate for _, gate in found if gate is not None], axis=2)
                gates[name] += [
                    gates_by_kind(kept[:, place], tokens[place], counts)
                    for place, length in enumerate(lengths)
                    if length >= GATE_ROWS
                ]
    seconds = round(time.monotonic() - began, 1)
    ends = [end * size.length for end in edges[1:]]
    for name, way in asked:
        by_book = losses[name, way]
        write(part="text", variant=name, way=way, ends=ends, seconds=seconds, nats=by_book)
    for name, by_book in gates.items():
        if by_book:
            write(part="gates", variant=name, kinds=kinds(), by_book=by_book)


def book_batches(
    books: Sequence[bytes], size: Size, *, rows: int
) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Beginnings `[batch, rows * length + 1]` of books of like length, and how many rows each has.

    The last batch is filled up with books that have no rows.
    """
    arrays = [np.frombuffer(book, np.uint8)[: rows * size.length + 1] for book in books]
    arrays = [book for book in arrays if len(book) > size.length]
    arrays.sort(key=len, reverse=True)
    for first in range(0, len(arrays), size.batch):
        batch = arrays[first : first + size.batch]
        lengths = [(len(book) - 1) // size.length for book in batch]
        tokens = np.zeros((size.batch, max(lengths) * size.length + 1), np.int32)
        for place, book in enumerate(batch):
            tokens[place, : len(book)] = book[: tokens.shape[1]]
        yield tokens, lengths


def section_means(nats: np.ndarray, edges: Sequence[int]) -> list[float | None]:
    """Mean loss of a book's rows `[rows, length]` from each edge to the next; None: no rows."""
    parts = [nats[first:end] for first, end in itertools.pairwise(edges)]
    return [round(float(part.mean()), 5) if len(part) else None for part in parts]


def trigram_counts(books: Sequence[bytes], *, most: int = 32_000_000) -> np.ndarray:
    """How often each byte stands behind two others in training text, `[2**24]`."""
    chosen, total = [], 0
    for book in books:
        chosen.append(np.frombuffer(book, np.uint8).astype(np.int32))
        total += len(book)
        if total >= most:
            break
    codes = np.concatenate([_trigrams(book) for book in chosen])
    return np.bincount(codes, minlength=2**24)


def _trigrams(tokens: np.ndarray) -> np.ndarray:
    return (tokens[:-2] << 16) + (tokens[1:-1] << 8) + tokens[2:]


def kinds() -> list[str]:
    """Names of the kinds of bytes of `gates_by_kind`."""
    names = [f"below {edge}" for edge in RARITIES] + [f"{RARITIES[-1]} and more"]
    return [*names, "letters", "digits", "others"]


def gates_by_kind(
    gates: np.ndarray, tokens: np.ndarray, counts: np.ndarray
) -> list[list[float | None]]:
    """Mean gate `[layers][kinds]` of a book; None where no byte is of the kind.

    Args:
      gates: `[layers, length]`.
      tokens: `[at least length]`, the bytes that they are gates of, and more.
      counts: how often training has a byte behind two others.
    """
    tokens = tokens[: gates.shape[1]]
    gates, last = gates[:, 2:], tokens[2:]
    rarity = np.searchsorted(RARITIES, counts[_trigrams(tokens)], side="right")
    letters = ((last | 32) >= ord("a")) & ((last | 32) <= ord("z"))
    digits = (last >= ord("0")) & (last <= ord("9"))
    chosen = [rarity == index for index in range(len(RARITIES) + 1)]
    chosen += [letters, digits, ~letters & ~digits]
    return [
        [round(float(layer[kind].mean()), 4) if kind.any() else None for kind in chosen]
        for layer in gates
    ]


class Score(NamedTuple):
    """Answers of one haystack, means over its questions."""

    exact: float
    """Share whose six digits are all the likeliest bytes, which greedy generation would write."""
    first: float
    """Share whose first digit is the likeliest of the ten digits."""
    digits: float
    """Share of digits that are the likeliest of the ten, the ones before them given."""
    nats: float
    """Loss of the six digits together."""


def scores(reading: Reading, asked: np.ndarray, *, questions: int) -> list[list[float]]:
    """The `Score` of every haystack of a batch, from rows that end with an answer.

    Args:
      reading: of `asked`.
      asked: `[haystacks * questions, length + 1]`.
      questions: of each haystack.
    """
    tail = slice(-text.VALUE_DIGITS, None)
    right = asked[:, tail]
    exact = (np.asarray(reading.best)[:, tail] == right).all(axis=1)
    digit = np.asarray(reading.best_digit)[:, tail] == right - ord("0")
    nats = np.asarray(reading.nats)[:, tail].sum(axis=1)
    each = np.stack([exact, digit[:, 0], digit.mean(axis=1), nats], axis=1).astype(np.float64)
    means = each.reshape(-1, questions, 4).mean(axis=1)
    return [[round(float(x), 4) for x in Score(*one)] for one in means]


def ask_needles(
    variants: dict[str, Trained],
    books: Sequence[bytes],
    size: Size,
    *,
    rows: int,
    words: str,
    batches: int,
    readings: int,
    seed: int,
    until: float,
    write: Write,
) -> None:
    """Scores of needles behind haystacks, after each reading, a line for each.

    A question is a row of its own: other text, then the question. Only the memory reaches it from
    the haystack, or the mixers' state where it is carried; without both a model can only guess.
    With haystacks of one row a line of reading 0 tells of questions at the end of the row that
    states the needle, which the mixers reach too.

    Args:
      variants: by name.
      books: unseen text.
      size: of rows and batch.
      rows: length of the haystacks.
      words: a name in `WORDS`.
      batches: of haystacks, at most.
      readings: of each haystack.
      seed: of the haystacks, which are the same for all variants.
      until: `time.monotonic()` after which no batch starts.
      write: gets the lines.
    """
    rng = np.random.default_rng((seed, rows, list(WORDS).index(words)))
    found: dict[tuple[str, str, int], list[list[float]]] = {}
    gates: dict[str, list[list[float]]] = {}
    for batch in range(batches):
        if batch and time.monotonic() > until:
            break
        options = {"rows": rows, "needles": QUESTIONS, **WORDS[words]}
        drawn = text.haystacks(books, size, rng, **options)
        for name, variant in variants.items():
            for way in variant.ways()[:2]:
                memory = variant.start(way)
                if rows == 1 and way != "carried":
                    reading, _ = variant.read(memory, drawn.same_row, way)
                    of_row = scores(reading, drawn.same_row, questions=1)
                    found.setdefault((name, way, 0), []).extend(of_row)
                for number in range(readings if way == "written" else 1):
                    at_digits: list[Any] = []
                    if way != "rows":
                        for piece in text.rows_of(drawn.tokens, size.length):
                            reading, memory = variant.read(memory, piece, way)
                            at_digits.append(reading.gates)
                    answers = variant.answer(memory, drawn.asked, way)
                    key = (name, way, number + 1)
                    found.setdefault(key, []).extend(
                        scores(answers, drawn.asked, questions=QUESTIONS)
                    )
                    if way == "written" and number == 0:
                        each = np.concatenate(jax.device_get(at_digits), axis=2)
                        mean = [each[:, drawn.stated].mean(), each[:, ~drawn.stated].mean()]
                        gates.setdefault(name, []).append([round(float(x), 4) for x in mean])
    for (name, way, reading), by_haystack in found.items():
        about = {"variant": name, "way": way, "bytes": rows * size.length, "words": words}
        write(part="needles", **about, reading=reading, by_haystack=by_haystack)
    for name, by_batch in gates.items():
        about = {"variant": name, "bytes": rows * size.length, "words": words}
        write(part="gates at needles", **about, stated_and_other=by_batch)
