"""Sessions as training rows, made on all processors.

    python -m lab.real_model.made_sessions --sessions 60000 --out SESSIONS.npz --tokenizer FILE \
        --books BOOKS.jsonl

A share of the sessions is pieces of books, which keep the memory's gate shut elsewhere.
"""

import json
import multiprocessing
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import parse
from fwpkm_jax.data.contract import AbstractDataConfig
from fwpkm_jax.data.sessions import SessionRows, SessionSource, session_of
from fwpkm_jax.data.tokenizers import Tokenizer, load_tokenizer
from lab.real_model.grammar import Grammar, record, sentences

_WORDS, _TOKENS = 280, 320  # Of a book in one row, at most.
_FEW, _NEAR, _LETTERS = 12, 10, 4
"""Words before a piece alone; tokens within which, and letters up to which, no word comes back."""
_SHARD, _TRIES = 250, 4  # Sessions of a task, and how often each may be too long.
VALIDATION = 64
"""Rows that are kept for validation, the last ones."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Makes sessions."""

    out: Path
    """File for the rows."""
    tokenizer: Path
    """The model's tokenizer.json."""
    books: Path
    """JSON lines of books."""
    sessions: int = 1000
    """Of this number, rounded up to a multiple of 250."""
    wide: float = 0.4
    """Share of relations of drawn verbs and nouns."""
    passages: float = 0.0
    """Share of the other sessions that tell passages."""
    of_books: float = 0.2
    """Share of sessions that are pieces of books."""
    recurring: bool = False
    """Tokens of books weigh 0.3 in place of 0.05, words that come back in their piece 0.95, and
    half of the pieces follow a few words alone: what a text tells itself is not the memory's."""
    new_forms: bool = False
    """Forms that are kept apart for the test."""
    new_words: bool = False
    """Names and values that are kept apart for the test."""
    labels: int = 640
    """Of a row, which holds all rows of a session; longer sessions are left out."""
    processes: int = os.cpu_count() or 1
    """That make sessions."""
    seed: int = 0
    """Of all draws."""


@dataclass(frozen=True, kw_only=True)
class MadeSessions(AbstractDataConfig):
    """Rows of a file that this program has written; validation takes the last 64 rows."""

    file: str
    """The file."""
    vocabulary: int
    """Token ids."""

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    def source(self, *, split: str, seed: int) -> "_Rows":
        return _Rows(Path(self.file), split == "valid", random.Random(seed))


class _Rows:
    def __init__(self, file: Path, valid: bool, rng: random.Random) -> None:
        with np.load(file) as arrays:
            self._arrays = {name: arrays[name] for name in arrays}
        number = len(self._arrays["tokens"])
        self._order = list(
            range(number - VALIDATION, number) if valid else range(number - VALIDATION)
        )
        if not valid:
            rng.shuffle(self._order)
        self._length = len(self._order) if valid else 2**31 - 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self._order[index % len(self._order)]
        kinds = {"loss_weight": np.float32}
        return {n: x[row].astype(kinds.get(n, np.int32)) for n, x in self._arrays.items()}


def _make_shard(task: tuple[Options, int]) -> dict[str, np.ndarray]:
    """Some sessions as training rows, of a process of its own."""
    options, shard = task
    tokenizer = load_tokenizer(str(options.tokenizer))
    if "grammar" not in _KEPT:
        _KEPT["grammar"] = Grammar(
            options.tokenizer,
            sentences(options.books),
            new_forms=options.new_forms,
            new_words=options.new_words,
            wide=options.wide,
            passages=options.passages,
        )
        texts = [json.loads(line)["text"] for line in options.books.read_text().splitlines()]
        _KEPT["words"] = [text.split(" ") for text in texts]
    kind, number = SessionRows(text_weight=0.05), 0
    rows: list[dict[str, Any]] = []
    while len(rows) < _SHARD:
        if number >= _TRIES * _SHARD:
            raise ValueError(
                f"labels={options.labels}: {len(rows)} of {number} sessions fit; raise it, or name"
                " the tokenizer of the model."
            )
        rng = random.Random(f"{options.seed}-{shard}-{number}")
        number += 1
        if rng.random() < options.of_books:
            words = rng.choice(_KEPT["words"])
            start = rng.randrange(max(1, len(words) - 2 * _WORDS))
            pieces = [words[start : start + _WORDS], words[start + _WORDS : start + 2 * _WORDS]]
            if options.recurring and rng.random() < 0.5:
                pieces[0] = pieces[0][-_FEW:]
            made: dict[str, Any] = {"rows": [{"text": " ".join(x)} for x in pieces if x]}
        else:
            session = _KEPT["grammar"].session(rng, facts=rng.randint(8, 12), asked=10, chat=0.5)
            made = record(session, rng)
        read = session_of(made, tokenizer)
        if read[0].tokens.size < 8:
            continue
        if not any(x.answers for x in read):
            read = [x._replace(tokens=x.tokens[:_TOKENS]) for x in read[:2]]
        try:
            row = SessionSource([read], kind, length=options.labels)[0]
        except ValueError:  # Too long.
            continue
        if options.recurring and not any(x.answers for x in read):
            row = row | {"loss_weight": _recurring(row, tokenizer)}
        rows.append(row)
    # Half the bytes of what a batch holds.
    kinds = {"tokens": np.int32, "loss_weight": np.float16, "segment_ids": np.uint8}
    kinds["answer_distance"] = np.uint16
    return {name: np.stack([row[name] for row in rows]).astype(kinds[name]) for name in rows[0]}


def _recurring(row: dict[str, Any], tokenizer: Tokenizer) -> np.ndarray:
    """Weights of a row of books, whose words that come back are what another text would disturb."""
    tokens, weight = row["tokens"], np.where(row["loss_weight"] > 0, 0.3, 0)
    places = np.flatnonzero(weight)
    for place in places:
        label = tokens[place + 1]
        near = tokens[max(0, place - _NEAR) : place + 1]
        before = tokens[places[0] : place + 1]
        if label in before and label not in near:
            word = tokenizer.decode(tokens[place + 1 : place + 2])
            if len(word) > _LETTERS and word.startswith(" "):
                weight[place] = 0.95
    return weight


_KEPT: dict[str, Any] = {}
"""What a process that makes sessions has read."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the sessions' rows."""
    options = parse(Options, argv)
    shards = [(options, shard) for shard in range(-(-options.sessions // _SHARD))]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        made = pool.map(_make_shard, shards, chunksize=1)
    partial = options.out.with_suffix(".partial.npz")
    whole: dict[str, Any] = {name: np.concatenate([one[name] for one in made]) for name in made[0]}
    np.savez(partial, **whole)
    partial.replace(options.out)


if __name__ == "__main__":
    main()
