"""Books as bytes: packed for a sitting, as streams with needles for training, as samples."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.study.real_size.sizes import Size
from lab.study.real_size.wordings import TRAINED, Wording

KEY_CHARACTERS, VALUE_DIGITS = 4, 6
SHARE = 0.2
"""Share of the rows of training that state needles."""
ASKS = 2
"""Questions for each needle, in its own wording or in another."""
ANSWER_WEIGHT = 16
"""Weight in the loss of a digit that answers a question; all other bytes have 1."""
_FARTHEST = 6.0
"""Rows from a statement to its last question, at most."""
_PARTS = 4
"""Files of packed training text, which are read side by side."""


class Books(NamedTuple):
    """The text of a sitting."""

    train: list[bytes]
    """Books to train on."""
    valid: list[bytes]
    """Books of other authors."""


def read_books(folder: Path) -> Books:
    """The books of `train*.jsonl.xz` and `valid.jsonl.xz` in a folder.

    Raises:
      FileNotFoundError: one of them is absent.
    """
    files = [*sorted(folder.glob("train*.jsonl.xz")), folder / "valid.jsonl.xz"]
    if len(files) < 2:
        raise FileNotFoundError(
            f"{folder} holds no train*.jsonl.xz; --prepare writes a folder from ../shared/data/"
            "books_large, or --data names another."
        )
    with ThreadPoolExecutor() as pool:  # lzma works outside the interpreter's lock.
        *train, valid = pool.map(_texts, files)
    return Books([book for part in train for book in part], valid)


def _texts(path: Path) -> list[bytes]:
    with lzma.open(path) as lines:
        return [json.loads(line)["text"].encode() for line in lines]


def pack_books(folder: Path, out: Path, *, train_bytes: int, valid_bytes: int, seed: int) -> int:
    """Writes a choice of books, packed, for a machine that takes few bytes; how many they are.

    Args:
      folder: as in `read_books`.
      out: folder of the new files, which `read_books` reads.
      train_bytes: of the text to train on, at most.
      valid_bytes: beginning of each unseen book.
      seed: of the choice of books.
    """
    books = read_books(folder)
    chosen: list[bytes] = []
    for index in np.random.default_rng(seed).permutation(len(books.train)):
        if sum(map(len, chosen)) + len(books.train[index]) <= train_bytes:
            chosen.append(books.train[index])
    parts = {f"train_{part}.jsonl.xz": chosen[part::_PARTS] for part in range(_PARTS)}
    parts["valid.jsonl.xz"] = [book[:valid_bytes] for book in books.valid]
    out.mkdir(parents=True, exist_ok=True)

    def write(name: str) -> int:
        records = [json.dumps({"text": book.decode(errors="ignore")}) for book in parts[name]]
        packed = lzma.compress("\n".join(records).encode(), preset=9)
        (out / name).write_bytes(packed)
        return len(packed)

    with ThreadPoolExecutor() as pool:
        return sum(pool.map(write, parts))


class TrainingText:
    """Rows for training: each place of a batch reads its own part of the text from start to end.

    A row begins where the one before it ended, so that a memory which is carried from step to step
    reads a text. In a fifth of the rows needles are stated, each in a wording of its own; they are
    asked for twice, a fraction of a row to six rows later.
    """

    def __init__(self, books: Sequence[bytes], size: Size, *, seed: int):
        """Lays the text out.

        Args:
          books: of the text.
          size: length of rows, rows of a batch, needles of a row.
          seed: of the order of books and of the needles.
        """
        rng = np.random.default_rng(seed)
        text = b"\n\n".join(books[index] for index in rng.permutation(len(books)))
        self._length = size.length
        parts = np.array_split(np.frombuffer(text, np.uint8), size.batch)
        streams = [with_needles(part, size, rng) for part in parts]
        shortest = min(len(tokens) for tokens, _ in streams)
        self._tokens = np.stack([tokens[:shortest] for tokens, _ in streams])
        self._weights = np.stack([weights[:shortest] for _, weights in streams])
        self.steps = (shortest - 1) // size.length
        """Batches until the text has been read once."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """`tokens [batch, length + 1]` int32 and `loss_weight [batch, length]` of a step."""
        start = step % self.steps * self._length
        end = start + self._length + 1
        return {
            "tokens": self._tokens[:, start:end].astype(np.int32),
            "loss_weight": self._weights[:, start + 1 : end].astype(np.float32),
        }


def with_needles(
    text: np.ndarray, size: Size, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A text with needles and the weight of each byte in the loss, uint8 both."""
    rows = np.flatnonzero(rng.random(len(text) // size.length) < SHARE)
    inserted: list[tuple[float, bytes, bool]] = []  # Place, sentence, whether it answers.
    for row in rows:
        for key, value in draw_needles(rng, size.needles):
            own = TRAINED[rng.integers(len(TRAINED))]
            at = size.length * (row + rng.random())
            inserted.append((at, own.sentence(key, value), False))
            for _ in range(ASKS):
                asked = own if rng.random() < 0.5 else TRAINED[rng.integers(len(TRAINED))]
                far = size.length * np.exp(rng.uniform(np.log(1 / 16), np.log(_FARTHEST)))
                inserted.append((at + far, asked.sentence(key, value), True))
    inserted.sort(key=lambda one: one[0])
    places = _word_starts(text, np.array([at for at, *_ in inserted]))
    tokens, weights, before = [], [], 0
    for place, (_, sentence, answers) in zip(places, inserted, strict=True):
        weight = np.ones(len(sentence), np.uint8)
        if answers:
            weight[-2 - VALUE_DIGITS : -2] = ANSWER_WEIGHT
        tokens += [text[before:place], np.frombuffer(sentence, np.uint8)]
        weights += [np.ones(place - before, np.uint8), weight]
        before = place
    tokens.append(text[before:])
    weights.append(np.ones(len(text) - before, np.uint8))
    return np.concatenate(tokens), np.concatenate(weights)


def draw_needles(rng: np.random.Generator, number: int) -> list[tuple[str, str]]:
    """Distinct hexadecimal keys with random numbers."""
    keys = rng.choice(16**KEY_CHARACTERS, size=number, replace=False)
    values = rng.integers(10, size=(number, VALUE_DIGITS))
    return [
        (f"{key:0{KEY_CHARACTERS}x}", "".join(map(str, value)))
        for key, value in zip(keys, values, strict=True)
    ]


def _word_starts(text: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The first start of a word at or behind each place; the end of the text if there is none."""
    starts = np.flatnonzero(np.isin(text, tuple(b" \n"))) + 1
    starts = np.append(starts, len(text))
    return starts[np.minimum(np.searchsorted(starts, places), len(starts) - 1)]


class Haystacks(NamedTuple):
    """A batch of unseen text with needles, and the questions."""

    tokens: np.ndarray
    """`[batch, rows * length + 1]` int32: every needle is stated once."""
    asked: np.ndarray
    """`[batch * needles, ask_length + 1]` int32: other text, a question, its answer at the end;
    neighbours are of one haystack."""
    same_row: np.ndarray
    """`[batch, length + 1]` int32: a row that states the needles and ends with the first question
    and its answer."""
    stated: np.ndarray
    """`[batch, rows * length]`, true where the label is a digit of a needle."""


def haystacks(
    books: Sequence[bytes],
    size: Size,
    rng: np.random.Generator,
    *,
    rows: int,
    needles: int,
    wordings: Sequence[Wording],
    other_question: bool = False,
) -> Haystacks:
    """Haystacks of `rows` rows, one for each place of a batch.

    Args:
      books: unseen; a haystack is of one book, or of several where it is longer than they are.
      size: of rows and batch.
      rng: of books, places, needles and wordings.
      rows: length of a haystack.
      needles: stated in each haystack.
      wordings: of the sentences.
      other_question: True: a question has another of the wordings than its needle.
    """
    total = rows * size.length + 1
    tokens, stated, asked, same_row = [], [], [], []
    for _ in range(size.batch):
        drawn = draw_needles(rng, needles)
        order = rng.permutation(len(wordings))
        own = [wordings[order[index % len(order)]] for index in range(needles)]
        sentences = [w.sentence(*needle) for w, needle in zip(own, drawn, strict=True)]
        text, digits = _hide(_unseen(books, rng, total - sum(map(len, sentences))), sentences, rng)
        tokens.append(text)
        stated.append(digits[1:])
        questions = []
        for index, (key, value) in enumerate(drawn):
            wording = own[(index + 1) % needles] if other_question else own[index]
            questions.append(np.frombuffer(wording.question(key) + value.encode(), np.uint8))
        for question in questions:
            context = _unseen(books, rng, size.ask_length + 1 - len(question))
            asked.append(np.concatenate([context, question]))
        left = size.length + 1 - len(questions[0]) - sum(map(len, sentences))
        text, _ = _hide(_unseen(books, rng, left), sentences, rng)
        same_row.append(np.concatenate([text, questions[0]]))
    arrays = (np.stack(x).astype(np.int32) for x in (tokens, asked, same_row))
    return Haystacks(*arrays, stated=np.stack(stated))


def _hide(
    text: np.ndarray, sentences: Sequence[bytes], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The text with the sentences at random words, and where it has their digits."""
    limit = len(text) - max(map(len, sentences))
    places = np.sort(_word_starts(text, rng.uniform(0, max(limit, 1), size=len(sentences))))
    pieces, digits, before = [], [], 0
    for place, sentence in zip(places, sentences, strict=True):
        mark = np.zeros(len(sentence), bool)
        mark[-2 - VALUE_DIGITS : -2] = True
        pieces += [text[before:place], np.frombuffer(sentence, np.uint8)]
        digits += [np.zeros(place - before, bool), mark]
        before = place
    pieces.append(text[before:])
    digits.append(np.zeros(len(text) - before, bool))
    return np.concatenate(pieces), np.concatenate(digits)


def _unseen(books: Sequence[bytes], rng: np.random.Generator, length: int) -> np.ndarray:
    """A random piece of a random book; if it ends too soon, the next books follow.

    Raises:
      ValueError: a row is too short for its sentences, so that no text is left.
    """
    if length < 1:
        raise ValueError(f"{length} bytes of text are left beside the needles; make rows longer.")
    index = int(rng.integers(len(books)))
    book = books[index]
    start = int(rng.integers(max(len(book) - length, 1)))
    text = book[start : start + length]
    while len(text) < length:
        index = (index + 1) % len(books)
        text += books[index][: length - len(text)]
    return np.frombuffer(text, np.uint8)


def rows_of(tokens: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Pieces `[batch, length + 1]` of `[batch, rows * length + 1]`, each with its last label."""
    for start in range(0, tokens.shape[1] - 1, length):
        yield tokens[:, start : start + length + 1]
