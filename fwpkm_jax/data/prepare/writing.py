"""Reads, encodes and writes records, with points from which to continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from fwpkm_jax.data.prepare.files import Checksum, InputChecksums
from fwpkm_jax.data.prepare.output import START, TokenOutput, Written
from fwpkm_jax.data.prepare.progress import Progress
from fwpkm_jax.data.prepare.records import Record, Source
from fwpkm_jax.data.tokenizers import Tokenizer

# Records are encoded together up to either limit, which also limits the memory used.
_BATCH_CHARACTERS = 2**22
_BATCH_RECORDS = 1024


class Counts(TypedDict):
    """Amounts read so far."""

    documents: int
    characters: int
    tokens: int
    """Including ends of documents; exceeds the written tokens if rows were cut or capped."""


class State(TypedDict):
    """A point from which a job can continue."""

    job: dict[str, Any]
    span: int
    position: int
    read: Counts
    written: Written
    inputs: dict[str, Checksum]
    finished: bool
    """Everything is in the partial files."""


def first_state(job: dict[str, Any]) -> State:
    """The beginning of a job."""
    return {
        "job": job,
        "span": 0,
        "position": 0,
        "read": {"documents": 0, "characters": 0, "tokens": 0},
        "written": START,
        "inputs": {},
        "finished": False,
    }


def write(
    state: State,
    *,
    source: Source,
    out: Path,
    encoder: Tokenizer,
    num_threads: int,
    progress: Progress,
    save: Callable[[State], None],
    save_seconds: float,
) -> State:
    """Continues from a state to the end of the source or to a limit; saves and returns the state.

    Raises:
      ValueError: a file has changed or cannot be read.
    """
    max_tokens, layout = state["job"]["max_tokens"], state["job"]["layout"]
    output = TokenOutput(
        out,
        state["written"],
        layout=layout,
        vocab_size=encoder.vocab_size,
        max_tokens=max_tokens,
    )
    try:
        worker = _Worker(state, source, encoder, num_threads, output, save)
        progress.begin(worker.read["tokens"])
        saved = time.monotonic()
        for batch in worker.batches():
            worker.add(batch)
            if worker.full:
                break
            progress.show(
                part=worker.place,
                documents=worker.read["documents"],
                tokens=worker.read["tokens"],
                limit=max_tokens,
            )
            if time.monotonic() - saved >= save_seconds:
                worker.save()
                saved = time.monotonic()
        return worker.save(finished=True)
    finally:
        output.close()


class _Worker:
    """The position of reading."""

    def __init__(
        self,
        state: State,
        source: Source,
        encoder: Tokenizer,
        num_threads: int,
        output: TokenOutput,
        save: Callable[[State], None],
    ):
        self._job, self._span, self._position = state["job"], state["span"], state["position"]
        self.read = state["read"]
        self._inputs = InputChecksums(state["inputs"])
        self._source, self._encoder, self._num_threads = source, encoder, num_threads
        self._end = np.asarray([encoder.eos_id] if source.append_eos else [], np.int32)
        self._output, self._save = output, save

    @property
    def full(self) -> bool:
        """Whether a limit has been reached."""
        limit = self._job["max_characters"]
        return self._output.full or (limit is not None and self.read["characters"] >= limit)

    @property
    def place(self) -> str:
        """A description of the part that is being read."""
        spans = self._source.spans
        name = spans[self._span].part.name
        return f"{self._source.name} {self._span + 1}/{len(spans)} {name}"

    def batches(self) -> Iterator[list[Record]]:
        """The records from here on, several at a time, each batch of one part."""
        for number in range(self._span, len(self._source.spans)):
            part, start, stop = self._source.spans[number]
            if number > self._span:
                self._span, self._position = number, 0
            self._inputs.add(part)
            yield from _batches(_until(part.read(max(start, self._position)), stop))

    def add(self, batch: list[Record]) -> None:
        """Encodes and writes records, up to the document that reaches a limit."""
        texts = [text for record in batch for text in record.texts]
        for text, ids in zip(
            texts, self._encoder.encode_batch(texts, num_threads=self._num_threads), strict=True
        ):
            tokens = np.concatenate([ids, self._end])
            self.read["documents"] += 1
            self.read["characters"] += len(text)
            self.read["tokens"] += len(tokens)
            self._output.add(tokens)
            if self.full:
                break
        self._position = batch[-1].position

    def save(self, *, finished: bool = False) -> State:
        """Writes everything to disk, then the state."""
        state: State = {
            "job": self._job,
            "span": self._span,
            "position": self._position,
            "read": self.read,
            "written": self._output.sync(),
            "inputs": self._inputs.known,
            "finished": finished,
        }
        self._save(state)
        return state


def _until(records: Iterable[Record], stop: int | None) -> Iterator[Record]:
    for record in records:
        if stop is not None and record.position > stop:
            return
        yield record


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += sum(map(len, record.texts))
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
