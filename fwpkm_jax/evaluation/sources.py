"""The texts that evaluations read, by data set, with the hashes of their files."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fwpkm_jax.data import Document, TextData, Tokenizer, stream_documents
from fwpkm_jax.data.packing import PackedRows
from fwpkm_jax.data.streams.files import LocalFile, data_files
from fwpkm_jax.data.text import valid_rows


class Source(NamedTuple):
    """One data set."""

    name: str
    """Its name in results."""
    documents: Callable[..., Iterable[Document]]
    """Starts a pass over its documents, in order; each may be cut after `most_tokens=`."""
    files: dict[str, str]
    """SHA-256 of each file, by path."""


def text_sources(data: TextData) -> list[Source]:
    """One data set for each path of validation text, such as `Subject.text` has.

    Raises:
      ValueError: it names no text.
      FileNotFoundError: a path does not exist.
    """
    if not data.valid_paths:
        raise ValueError(
            "The run names no validation text (data.valid_paths=()); give a path, as in --data "
            "PATH."
        )
    return [
        Source(
            name,
            partial(stream_documents, dataclasses.replace(data, valid_paths=(name,)), "valid"),
            file_hashes(name),
        )
        for name in data.valid_paths
    ]


def texts_of(sources: Iterable[Source], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Pairs of id and text of all documents, in order."""
    for source in sources:
        for document in source.documents():
            yield document.id, tokenizer.decode(document.tokens)


def missing_text(data: TextData) -> str | None:
    """What an evaluation that reads `text_sources` lacks; None if there is a text to read."""
    return None if data.valid_paths else "a text (no --data PATH, no data.valid_paths)"


def capped(
    source: Source,
    *,
    max_documents: int | None = None,
    max_tokens: int | None = None,
) -> Iterator[Document]:
    """The documents up to the limits; the last one may be cut short.

    Args:
      source: a data set.
      max_documents: largest number of documents; None: all.
      max_tokens: largest number of labels; None: all.
    """
    left = max_tokens
    most = None if max_tokens is None else max_tokens + 1
    for number, document in enumerate(source.documents(most_tokens=most)):
        if number == max_documents or left == 0:
            return
        if left is not None:
            document = document._replace(tokens=document.tokens[: left + 1])
            left -= max(0, len(document.tokens) - 1)
        yield document


def num_labels(
    sources: Iterable[Source], *, max_documents: int | None, max_tokens: int | None
) -> int:
    """Number of tokens to predict in all data sets, with the limits of `capped` on each of them."""
    documents = (
        document
        for source in sources
        for document in capped(source, max_documents=max_documents, max_tokens=max_tokens)
    )
    return sum(max(0, len(document.tokens) - 1) for document in documents)


def read_rows(path: str | Path, data: TextData) -> PackedRows:
    """All rows of a file or folder, with the tokenizer and row length of `data`."""
    rows = valid_rows(dataclasses.replace(data, valid_paths=(str(path),), packing="concat"))
    assert isinstance(rows, PackedRows)
    return rows


def files_of(hashes: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The files of several texts together, SHA-256 by path."""
    return {path: digest for files in hashes for path, digest in files.items()}


def file_hashes(name: str | Path) -> dict[str, str]:
    """SHA-256 of each file below a path, by file; a tokenised file's index is hashed too."""
    hashes = {}
    for file in data_files(name):
        hashes[file.name] = file.sha256()
        if isinstance(file, LocalFile) and file.kind == ".bin":
            index = file.path.with_suffix(".idx")
            hashes[str(index)] = sha256(index)
    return hashes


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal.

    Raises:
      FileNotFoundError: there is no such file.
      OutsideFileError: it is a directory, a pipe or a device, or cannot be read.
    """
    return LocalFile(str(path), path).sha256()
