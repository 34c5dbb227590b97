"""Tokenised files written at once, which those of a preparation are held to."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fwpkm_jax.data.token_files import check_token_file, entry_bytes, index_header, index_line


def write_token_file(
    path: Path, entries: Iterable[np.ndarray], *, vocab_size: int, max_tokens: int | None = None
) -> int:
    """Writes entries to `path` (`.bin`) and the `.idx` beside it; returns the tokens written."""
    check_token_file(path, vocab_size=vocab_size)
    written = 0
    with path.open("wb") as data, path.with_suffix(".idx").open("wb") as index:
        index.write(index_header(vocab_size))
        for number, entry in enumerate(entries):
            data.write(entry_bytes(entry, number=number, vocab_size=vocab_size))
            index.write(index_line(len(entry), start=written, vocab_size=vocab_size))
            written += len(entry)
            if max_tokens is not None and written >= max_tokens:
                break
    return written


def cut_rows(documents: Iterable[np.ndarray], *, row_length: int) -> Iterator[np.ndarray]:
    """Consecutive rows of `row_length` tokens of all documents; a short last row is dropped."""
    tokens = np.concatenate([np.zeros(0, np.int32), *documents])
    yield from tokens[: len(tokens) // row_length * row_length].reshape(-1, row_length)
