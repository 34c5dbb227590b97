"""Tokenised files: a `.bin` of token ids and an `.idx` with the position of each entry.

`.bin` holds little-endian ids, uint16 for a vocabulary of up to 65,536 ids and uint32 for a larger
one, of which the first line of `.idx` then says `# uint32`. Each other line of `.idx` is `length
offset`, the length in tokens and the offset in bytes; entries follow each other without gaps. Two
layouts share the format: fixed-length rows of the concatenation of all documents, and one entry per
document.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from fwpkm_jax.io.atomic import replacing
from fwpkm_jax.io.untrusted import OutsideFileError, read_bytes, reading, size_of

_WIDE = b"# uint32\n"
"""The first line of the index of a file with four bytes per token."""
_MAX_VOCAB_SIZE = 2**31  # Models take int32.
_MOST_LINE_BYTES = 64
_LINE = re.compile(rb"\d{1,18} \d{1,18}")
_WRITE = "write both files again"


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of ids in a tokenised file of this vocabulary."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def index_header(vocab_size: int) -> bytes:
    """What the index of a file of this vocabulary begins with."""
    return b"" if token_dtype(vocab_size).itemsize == 2 else _WIDE


class TokenFile:
    """The entries of a tokenised file; nothing is read before it is used.

    The file is not memory-mapped: a process that reads beyond the end of a truncated mapped file is
    killed by the system.
    """

    def __init__(self, path: Path, *, vocab_size: int):
        """Opens `path` (`.bin`) and the `.idx` beside it.

        Args:
          path: the `.bin` file.
          vocab_size: of the tokenizer that wrote it; larger ids are an error when read.

        Raises:
          FileNotFoundError: there is no `.bin` or no `.idx` beside it.
          ValueError: the two do not belong together.
        """
        self.path = path
        self._vocab_size = vocab_size
        index = path.with_suffix(".idx")
        for file in (path, index):
            if not file.exists():
                raise FileNotFoundError(
                    f"There is no {file.absolute()}; a tokenised text is a .bin and an .idx file. "
                    "`python -m fwpkm_jax.data.prepare` writes both from text, and "
                    "`fwpkm_jax.data.write_token_file` from arrays of ids."
                )
        size = size_of(path)
        lengths, self._dtype = _read_index(index, size)
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        if size != self._dtype.itemsize * len(self):
            problem = (
                f"holds {size} bytes, but the {len(lengths)} entries of {index.name} need "
                f"{self._dtype.itemsize * len(self)}"
            )
            raise OutsideFileError(path, problem, otherwise=_WRITE)

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self._bounds[-1])

    def __getitem__(self, tokens: slice) -> np.ndarray:
        """The ids at a slice of the concatenated entries, uint16 or uint32.

        Raises:
          ValueError: an id lies outside the vocabulary, or the file has shrunk.
        """
        start, stop, _ = tokens.indices(len(self))
        with reading(self.path, otherwise="put the file back"):
            ids = np.fromfile(
                self.path,
                self._dtype,
                count=max(stop - start, 0),
                offset=start * self._dtype.itemsize,
            )
        if len(ids) < stop - start:
            problem = (
                f"has lost its end since it was opened: {stop - start} tokens from token {start} "
                f"on were asked for, {len(ids)} are there"
            )
            raise OutsideFileError(self.path, problem, otherwise="put the file back")
        if ids.size and ids.max() >= self._vocab_size:
            position = start + int(ids.argmax())
            problem = (
                f"holds the id {ids.max()} at token {position}, outside a vocabulary of "
                f"{self._vocab_size}"
            )
            way_out = "name the tokenizer that wrote the file"
            raise OutsideFileError(self.path, problem, otherwise=way_out)
        return ids

    @property
    def num_entries(self) -> int:
        """Number of lines of the index."""
        return len(self._bounds) - 1

    def entry_length(self, index: int) -> int:
        """Tokens of one entry."""
        return int(self._bounds[index + 1] - self._bounds[index])

    def entry(self, index: int, tokens: slice = slice(None)) -> np.ndarray:
        """The ids of one entry, or of a slice of it, uint16 or uint32 `[tokens]`."""
        first = int(self._bounds[index])
        start, stop, _ = tokens.indices(self.entry_length(index))
        return self[first + start : first + stop]


class TokenFileEntry:
    """One entry of a tokenised file, read when it is sliced."""

    def __init__(self, file: TokenFile, number: int):
        self._file, self._number = file, number

    def __len__(self) -> int:
        return self._file.entry_length(self._number)

    def __getitem__(self, tokens: slice) -> np.ndarray:
        return self._file.entry(self._number, tokens)


def write_token_file(path: str | Path, entries: Iterable[ArrayLike], *, vocab_size: int) -> int:
    """Writes arrays of token ids as a tokenised file; returns the number of tokens.

    Args:
      path: the `.bin` file; its index gets the same name and `.idx`. Both are replaced once all is
        written.
      entries: integers `[tokens]` each, such as a document with its end-of-document token. They are
        taken one after the other, so an iterator needs no more memory than its largest array.

    Raises:
      ValueError: the path does not end in `.bin`, an id lies outside the vocabulary, or an entry is
        not one axis of integers.

    Example:
      >>> write_token_file("train.bin", [[5, 6, 2], [7, 2]], vocab_size=32000)  # doctest: +SKIP
      5
    """
    path, tokens = Path(path), 0
    check_token_file(path, vocab_size=vocab_size)
    with replacing(path.with_suffix(".idx")) as index, replacing(path) as data:
        index.write(index_header(vocab_size))
        for number, entry in enumerate(map(np.asarray, entries)):
            if entry.ndim != 1 or (entry.size and entry.dtype.kind not in "iu"):
                raise ValueError(
                    f"Entry {number} is {entry.dtype}{list(entry.shape)}; give integers [tokens]."
                )
            data.write(entry_bytes(entry, number=number, vocab_size=vocab_size))
            index.write(index_line(len(entry), start=tokens, vocab_size=vocab_size))
            tokens += len(entry)
    return tokens


def check_token_file(path: Path, *, vocab_size: int) -> None:
    """Raises ValueError unless `path` can name a tokenised file of this vocabulary."""
    if path.suffix != ".bin":
        raise ValueError(f"{path} must end in .bin; its index gets the same name and .idx.")
    if vocab_size > _MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size} exceeds the {_MAX_VOCAB_SIZE} ids of int32; "
            "the format cannot hold this tokenizer's text."
        )


def entry_bytes(entry: np.ndarray, *, number: int, vocab_size: int) -> bytes:
    """An entry as `.bin` holds it; ValueError, naming its `number`, for ids outside."""
    if len(entry) and not 0 <= entry.min() <= entry.max() < vocab_size:
        outside = entry[(entry < 0) | (entry >= vocab_size)][0]
        raise ValueError(
            f"Entry {number} holds the id {outside}, outside a vocabulary of {vocab_size}."
        )
    return entry.astype(token_dtype(vocab_size)).tobytes()


def index_line(length: int, *, start: int, vocab_size: int) -> bytes:
    """The line of `.idx` for an entry of `length` tokens after `start` earlier ones."""
    return f"{length} {start * token_dtype(vocab_size).itemsize}\n".encode("ascii")


def _read_index(path: Path, size: int) -> tuple[np.ndarray, np.dtype]:
    """Lengths in tokens of all entries, int64, having checked that offsets leave no gap; the type
    of the ids.

    Args:
      size: bytes of the file that it belongs to; entries behind its end are refused.
    """
    content = read_bytes(path, most=_MOST_LINE_BYTES * (size + 2**10), otherwise=_WRITE)
    wide = content.startswith(_WIDE)
    dtype, lines = np.dtype("<u4" if wide else "<u2"), content[len(_WIDE) * wide :].splitlines()
    for number, line in enumerate(lines, start=1 + wide):
        if _LINE.fullmatch(line) is None:
            problem = f"is {line[:_MOST_LINE_BYTES]!r}, not `length offset`"
            raise OutsideFileError(path, problem, f"line {number}", _WRITE)
    numbers = np.array([line.split() for line in lines], np.bytes_).reshape(-1, 2)
    lengths, offsets = numbers.astype(np.int64).T
    ends = np.cumsum(lengths, dtype=np.float64) * dtype.itemsize  # Of any size.
    starts = np.concatenate([[0], ends[:-1]])
    for number in np.flatnonzero((offsets != starts) | (ends > size))[:1]:
        problem = (
            f"has {lengths[number]} tokens at byte {offsets[number]}: the last entry ends at byte "
            f"{starts[number]:.0f}, and {path.stem}.bin at {size}"
        )
        raise OutsideFileError(path, problem, f"line {number + 1 + wide}", _WRITE)
    return lengths, dtype
