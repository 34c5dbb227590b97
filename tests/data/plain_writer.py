"""Tokenised files with a limit of tokens, which those of a preparation are held to."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fwpkm_jax import data


def write_token_file(
    path: Path, entries: Iterable[np.ndarray], *, vocab_size: int, max_tokens: int | None = None
) -> int:
    """Writes entries up to the one that reaches `max_tokens`; returns the tokens written."""
    return data.write_token_file(path, _capped(entries, max_tokens), vocab_size=vocab_size)


def _capped(entries: Iterable[np.ndarray], max_tokens: int | None) -> Iterator[np.ndarray]:
    tokens = 0
    for entry in entries:
        yield entry
        tokens += len(entry)
        if max_tokens is not None and tokens >= max_tokens:
            break


def cut_rows(documents: Iterable[np.ndarray], *, row_length: int) -> Iterator[np.ndarray]:
    """Consecutive rows of `row_length` tokens of all documents; a short last row is dropped."""
    tokens = np.concatenate([np.zeros(0, np.int32), *documents])
    yield from tokens[: len(tokens) // row_length * row_length].reshape(-1, row_length)
