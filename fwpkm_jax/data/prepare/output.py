"""Writes tokenised files that can be truncated to any saved point."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from fwpkm_jax.data.token_files import entry_bytes, index_header, index_line, token_dtype
from fwpkm_jax.io.atomic import open_own

Layout = Literal["l4096", "stream"]
"""l4096: rows of 4097 tokens of all documents laid end to end, a short last one dropped.
stream: one entry per document."""

ROW_LENGTH = 4097


START = {"entries": 0, "tokens": 0, "begun": 0, "index_bytes": 0, "pending": []}
"""The point from which writing begins. `tokens` are those of whole entries, `begun` those behind
them of an entry that is not whole yet; `pending` are the tokens of an incomplete row."""


class TokenOutput:
    """`NAME.bin.partial` and `NAME.idx.partial`, and the tokens that are not in them yet."""

    def __init__(
        self,
        path: Path,
        written: Mapping[str, Any],
        *,
        layout: Layout,
        vocab_size: int,
        max_tokens: int | None,
    ):
        """Opens the partial files of `path` (`.bin`), truncated to the point of continuation.

        Args:
          path: final name of the `.bin` file.
          written: `START`, or what `sync` returned.
          layout: see `Layout`.
          vocab_size: of the tokenizer.
          max_tokens: nothing follows the entry that reaches this many tokens.

        Raises:
          ValueError: the files hold less than was written.
        """
        self._layout = layout
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        data, index = partial_files(path)
        data_bytes = token_dtype(vocab_size).itemsize * (written["tokens"] + written["begun"])
        _check_size(data, data_bytes)
        _check_size(index, written["index_bytes"])
        self._data = _open(data, size=data_bytes)
        self._index = _open(index, size=written["index_bytes"])
        self.entries, self.tokens = written["entries"], written["tokens"]
        self._begun = written["begun"]
        self._index_bytes = written["index_bytes"]
        if not self._index_bytes:
            self._index_bytes += self._index.write(index_header(vocab_size))
        self._pending = np.asarray(written["pending"], np.int32)

    @property
    def full(self) -> bool:
        """Whether an entry has reached the cap."""
        return self._max_tokens is not None and self.tokens >= self._max_tokens

    def add(self, tokens: np.ndarray, *, ends: bool) -> None:
        """Writes a part of a document up to the entry that reaches the cap.

        Args:
          tokens: int32 `[tokens]`.
          ends: whether the document ends with them.

        Raises:
          ValueError: an id lies outside the vocabulary.
        """
        if self._layout == "stream":
            self._write(tokens, ends=ends)
            return
        tokens = np.concatenate([self._pending, tokens])
        whole = len(tokens) // ROW_LENGTH * ROW_LENGTH
        for row in tokens[:whole].reshape(-1, ROW_LENGTH):
            if self.full:
                return
            self._write(row, ends=True)
        self._pending = tokens[whole:]

    def _write(self, part: np.ndarray, *, ends: bool) -> None:
        """Writes a part of an entry, and where the entry `ends` its line of the index."""
        self._data.write(entry_bytes(part, number=self.entries, vocab_size=self._vocab_size))
        self._begun += len(part)
        if ends:
            line = index_line(self._begun, start=self.tokens, vocab_size=self._vocab_size)
            self._index_bytes += self._index.write(line)
            self.entries += 1
            self.tokens += self._begun
            self._begun = 0

    def sync(self) -> dict[str, Any]:
        """Writes everything to disk and returns the point of continuation."""
        for file in (self._data, self._index):
            file.flush()
            os.fsync(file.fileno())
        return {
            "entries": self.entries,
            "tokens": self.tokens,
            "begun": self._begun,
            "index_bytes": self._index_bytes,
            "pending": self._pending.tolist(),
        }

    def close(self) -> None:
        """Closes the files."""
        self._data.close()
        self._index.close()


def partial_files(path: Path) -> tuple[Path, Path]:
    """Names of `path` (`.bin`) and its index until they are complete."""
    data, index = final_files(path)
    return data.with_name(f"{data.name}.partial"), index.with_name(f"{index.name}.partial")


def final_files(path: Path) -> tuple[Path, Path]:
    """`path` (`.bin`) and its index."""
    return path, path.with_suffix(".idx")


def publish(path: Path) -> None:
    """Gives complete files their final names, data first: a reader asks for the index last."""
    for partial, final in zip(partial_files(path), final_files(path), strict=True):
        if partial.exists():
            partial.replace(final)


def discard(path: Path) -> None:
    """Removes the partial files of `path` (`.bin`)."""
    for partial in partial_files(path):
        partial.unlink(missing_ok=True)


def _check_size(path: Path, size: int) -> None:
    held = path.stat().st_size if path.exists() else 0
    if held < size:
        raise ValueError(
            f"{path} holds {held} bytes, fewer than the {size} already written; delete the "
            ".partial files to start again."
        )


def _open(path: Path, *, size: int) -> IO[bytes]:
    """A file truncated to `size` bytes and opened for writing; created if it is missing."""
    file = os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+b")
    file.truncate(size)
    file.seek(size)
    return file
