"""Sessions: rows that are read one after the other, of which none sees an earlier one.

A session is one record of JSON lines, `{"rows": [...]}`. A row is one of

- `{"text": "..."}`, read as it stands;
- `{"messages": [{"role": "user", "content": "..."}, ...]}`, as the tokenizer's chat template
  writes it, where what the assistant says are answers;
- `{"questions": [{"question": "...", "answer": " ..."}, ...]}`, a line for each.

An answer stands as it was told, with the blank before it. Beside it, `"about"` may give the words
that it stood behind when it was told; without, it is where an earlier row has it last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fwpkm_jax.data.batch import Example
from fwpkm_jax.data.chat_turns import has_template
from fwpkm_jax.data.json_lines import read_json_lines
from fwpkm_jax.data.streams.files import AbstractDataFile
from fwpkm_jax.data.tokenizers import Tokenizer
from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.literals import Checked, Count, NotNegative

_WAY_OUT = "see docs/howto/sessions.md for the form of a session"


@dataclass(frozen=True, kw_only=True)
class SessionRows(Checked):
    """How sessions become training rows: one a row, its own rows as documents.

    Train with one memory for each session of a batch (`training.memory`, `groups` of the batch's
    size, lifetime "batch"), so that it starts fresh and lasts from a session's first row to its
    last.
    """

    multiple: Count = 64
    """Each row of a session begins at a multiple of this many tokens, with padding before it. With
    the memory's chunk size, all that was told is written before a question reads."""
    answer_weight: NotNegative = 1.0
    """Weight in the training loss of the tokens of answers, and of the one that ends each."""
    text_weight: NotNegative = 0.1
    """Weight of all other tokens."""


class Answer(NamedTuple):
    """What is to be said at one place of a row.

    Attributes:
      start: the place of its first token in the row.
      tokens: int32 `[tokens]`.
      text: of the answer.
      told: row and token where an earlier row has its first token, or None.
    """

    start: int
    tokens: np.ndarray
    text: str
    told: tuple[int, int] | None


class SessionRow(NamedTuple):
    """One row of a session: its tokens, int32 `[tokens]`, and the answers in it."""

    tokens: np.ndarray
    answers: list[Answer]


class _Piece(NamedTuple):
    """A part of a row's text: an answer with the words that it was told behind, or no answer."""

    text: str
    is_answer: bool = False
    about: str | None = None


def read_sessions(
    files: Sequence[AbstractDataFile], tokenizer: Tokenizer
) -> Iterator[list[SessionRow]]:
    """The sessions of files of JSON lines, in order.

    Raises:
      OutsideFileError: a record is no session; the error names file and line.
    """
    for file in files:
        if file.kind not in (".jsonl", ".jsonl.gz"):
            raise OutsideFileError(
                file.name, "holds no sessions", otherwise="write them as JSON lines (.jsonl)"
            )
        with file.open_at(0) as lines:
            for place, record in read_json_lines(lines, name=file.name):
                yield session_of(record, tokenizer, file.name, f"line {place.record + 1}")


def session_of(
    record: dict[str, Any], tokenizer: Tokenizer, name: str = "the session", place: str = ""
) -> list[SessionRow]:
    """The rows of one record; `name` and `place` say in errors where it stands.

    Raises:
      OutsideFileError: the record is no session.
    """
    rows: list[SessionRow] = []
    texts: list[str] = []
    for number, row in enumerate(_list(record, "rows", name, place), start=1):
        inside = f"{place}, row {number}"
        if not isinstance(row, dict):
            raise OutsideFileError(name, "is no object", inside, _WAY_OUT)
        pieces = _pieces(row, tokenizer, name, inside)
        tokens, answers, length = [], [], 0
        for piece in pieces:
            ids = _encode(tokenizer, piece.text, "messages" in row)
            if piece.is_answer:
                told = _told(piece, texts, rows, ids, tokenizer)
                answers.append(Answer(length, ids, piece.text, told))
            tokens.append(ids)
            length += len(ids)
        if not length:
            raise OutsideFileError(name, "is empty", inside, _WAY_OUT)
        rows.append(SessionRow(np.concatenate(tokens), answers))
        texts.append("".join(piece.text for piece in pieces))
    if not rows:
        raise OutsideFileError(name, "has no rows", place, _WAY_OUT)
    return rows


def _pieces(row: dict[str, Any], tokenizer: Tokenizer, name: str, place: str) -> list[_Piece]:
    """The row's text in the pieces that are encoded one by one."""
    if "messages" in row:
        if not has_template(tokenizer):
            raise OutsideFileError(
                name, "has messages, and the tokenizer no chat template", place, _WAY_OUT
            )
        messages = _list(row, "messages", name, place)
        for message in messages:
            _text(message, "role", name, place)
            _text(message, "content", name, place)
        return _messages(messages, tokenizer)
    if "questions" in row:
        pieces = []
        for question in _list(row, "questions", name, place):
            about = _text(question, "about", name, place) if "about" in question else None
            pieces += [
                _Piece(_text(question, "question", name, place)),
                _Piece(_text(question, "answer", name, place), True, about),
                _Piece(".\n"),
            ]
        return pieces
    return [_Piece(_text(row, "text", name, place))]


def _messages(messages: list[dict[str, str]], tokenizer: Any) -> list[_Piece]:
    """A conversation cut where answers begin and end; the template may trim an answer."""
    pieces, done = [], 0
    whole = tokenizer.write_chat(messages, for_answer=False)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = len(tokenizer.write_chat(messages[:number]))
        shown = message["content"]
        if not whole.startswith(shown, start):
            shown = shown.strip()
        pieces += [
            _Piece(whole[done:start]),
            _Piece(whole[start : start + len(shown)], True, message.get("about")),
        ]
        done = start + len(shown)
    return [*pieces, _Piece(whole[done:])]


def _told(
    piece: _Piece,
    texts: list[str],
    rows: list[SessionRow],
    ids: np.ndarray,
    tokenizer: Tokenizer,
) -> tuple[int, int] | None:
    """The row and token where an answer was told; None where no row has these tokens."""
    sought = (piece.about or "") + piece.text
    for number in reversed(range(len(rows))):
        found = texts[number].rfind(sought)
        if found < 0:
            continue
        before = texts[number][: found + len(piece.about or "")]
        tokens = rows[number].tokens
        # Where the text is cut changes its tokens at most near the cut.
        guess = len(_encode(tokenizer, before, True))
        for start in sorted(range(len(tokens)), key=lambda place: abs(place - guess))[:9]:
            if start and np.array_equal(tokens[start : start + len(ids)], ids):
                return number, start
    return None


def _encode(tokenizer: Any, text: str, written: bool) -> np.ndarray:
    """Token ids; a text that a chat template wrote may hold control tokens."""
    return (
        tokenizer.encode_written(text)
        if written and has_template(tokenizer)
        else (tokenizer.encode(text))
    )


def _list(record: dict[str, Any], field: str, name: str, place: str) -> list[Any]:
    if not isinstance(record.get(field), list):
        raise OutsideFileError(name, f"has no list {field!r}", place, _WAY_OUT)
    return record[field]


def _text(record: Any, field: str, name: str, place: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise OutsideFileError(name, f"has no text {field!r}", place, _WAY_OUT)
    return record[field]


class SessionSource:
    """Random access to sessions as training rows of `length` labels."""

    def __init__(
        self, sessions: Sequence[list[SessionRow]], config: SessionRows, *, length: int
    ) -> None:
        self._config, self._length, self._sessions = config, length, sessions
        self.num_tokens = sum(len(row.tokens) for rows in sessions for row in rows)
        longest = max(map(self._room, sessions), default=0)
        if longest > length:
            raise ValueError(
                f"A session needs length={longest}, its rows at multiples of {config.multiple} "
                f"tokens, and length is {length}; raise length or cut the session."
            )

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, index: int) -> Example:
        """One session.

        Returns:
          `tokens` int32 `[length + 1]`, `loss_weight` float32 `[length]`, `segment_ids` int32
          `[length]`, from 1 on, 0 for padding; and `answer_distance` int32 `[length]`: at a label
          of an answer, the number of tokens to where it was told, 0 where that is not known.
        """
        config, length = self._config, self._length
        tokens = np.zeros(length + 1, np.int32)
        weights = np.zeros(length + 1, np.float32)
        segments = np.zeros(length + 1, np.int32)
        distance = np.zeros(length + 1, np.int32)
        starts: list[int] = []
        at = 0
        for number, row in enumerate(self._sessions[index], start=1):
            starts.append(at)
            end = at + len(row.tokens)
            tokens[at:end], segments[at:end] = row.tokens, number
            weights[at + 1 : end] = config.text_weight
            for answer in row.answers:
                first = at + answer.start
                last = first + len(answer.tokens)
                # And what ends it, so that a model learns to stop.
                weights[first : min(last + 1, end)] = config.answer_weight
                if answer.told is not None:
                    distance[first:last] = first - starts[answer.told[0]] - answer.told[1]
            at = self._next(end)
        return {
            "tokens": tokens,
            "loss_weight": weights[1:],
            "segment_ids": segments[:-1],
            "answer_distance": distance[1:],
        }

    def _next(self, end: int) -> int:
        """Where a row begins behind one that ends here."""
        return -(-end // self._config.multiple) * self._config.multiple

    def _room(self, rows: list[SessionRow]) -> int:
        """Labels that a session needs."""
        at = end = 0
        for row in rows:
            end = at + len(row.tokens)
            at = self._next(end)
        return end - 1
