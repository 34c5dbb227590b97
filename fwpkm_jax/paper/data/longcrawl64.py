"""LongCrawl64: documents of 65,536 GPT-2 tokens, decoded so that they can be tokenised again.

It comes as Zarr arrays (format 2) `[documents, 65536]` of uint16 in chunks of 2048 x 2048.

References: Buckman 2024, manifestai.com/articles/longcrawl64.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fwpkm_jax.data.json_lines import Place
from fwpkm_jax.data.prepare.command import AbstractRange
from fwpkm_jax.data.prepare.sources import Source, select
from fwpkm_jax.data.streams.files import LocalFile
from fwpkm_jax.data.streams.formats import Piece
from fwpkm_jax.data.tokenizers import Tokenizer, load_tokenizer
from fwpkm_jax.paper.data.zarr_array import ZarrArray

WANTED = (
    "train.zarr or heldout.zarr of huggingface.co/datasets/clankur/longcrawl64 with the file "
    ".zarray and all chunks of the rows you want"
)

WANTED_TOKENIZER = (
    "tokenizer.json and, into the same folder, config.json of huggingface.co/openai-community/gpt2"
)
_VOCAB_SIZE, _EOS_ID = 50_257, 50_256


@dataclass(frozen=True, kw_only=True)
class LongCrawl64(AbstractRange):
    """LongCrawl64: a Zarr folder of GPT-2 tokens, tokenised anew."""

    vocabulary: str
    """GPT-2's tokenizer.json, with the model's config.json beside it."""
    missing_chunks: Literal["refuse", "skip"] = "refuse"
    """skip: leave out the documents whose chunks were not downloaded, 2048 at a time."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        source = longcrawl64(
            self.input,
            vocabulary=self.vocabulary,
            missing_chunks=self.missing_chunks,
            start=self.skip_documents,
            stop=self.stop,
        )
        yield self.out, source, None


@dataclass(frozen=True)
class ZarrRows:
    """The documents of one row of chunks; needs their memory, 256 MiB at the published size."""

    path: Path
    name: str
    row: int
    array: ZarrArray
    decoder: Tokenizer

    @property
    def files(self) -> dict[str, LocalFile]:
        return {
            name: LocalFile(str(path), path) for name, path in self.array.chunks(self.row).items()
        }

    def count(self) -> int:
        return self.array.rows(self.row)[1] - self.array.rows(self.row)[0]

    def read(self, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
        first, last = self.array.rows(self.row)
        tokens = self.array.read(first + start.record, last)
        for record, document in enumerate(tokens, start=start.record):
            yield from _pieces(record, document, self.decoder, name=self.name, start=start)


def longcrawl64(
    path: str | Path,
    *,
    vocabulary: str,
    missing_chunks: Literal["refuse", "skip"] = "refuse",
    start: int = 0,
    stop: int | None = None,
) -> Source:
    """The documents in stored order; stored rows are split at ends of text.

    Args:
      vocabulary: GPT-2's `tokenizer.json`.
      missing_chunks: "refuse": a missing chunk file is an error; "skip": its row of chunks, 2048
        documents, is left out. Zarr itself would read zeros.
      stop: first document after those to read.

    Raises:
      FileNotFoundError: there is no array.
      ValueError: chunks are missing, the array is of another kind, or there is no vocabulary.
    """
    path, decoder = Path(path).expanduser(), _gpt2(vocabulary)
    array = ZarrArray.open(path, wanted=WANTED)
    rows = range(-(-array.shape[0] // array.chunk_shape[0]))
    missing = {
        row: names
        for row in rows
        if (names := [n for n, file in array.chunks(row).items() if not file.is_file()])
    }
    if missing and (missing_chunks == "refuse" or len(missing) == len(rows)):
        first = next(iter(missing.values()))[0]
        raise ValueError(
            f"{path} lacks {sum(map(len, missing.values()))} chunk files in {len(missing)} of "
            f"{len(rows)} rows of chunks, {first} the first; download them, or pass "
            "missing_chunks=skip to leave out the documents of those rows."
        )
    settings = {
        "vocabulary_sha256": decoder.fingerprint,
        "shape": list(array.shape),
        "rows_of_chunks_skipped": len(missing),
    }
    parts = [
        ZarrRows(path, f"{path.name}/{row}", row, array, decoder)
        for row in rows
        if row not in missing
    ]
    return Source(
        name="longcrawl64", spans=select(parts, start=start, stop=stop), settings=settings
    )


def _gpt2(vocabulary: str) -> Tokenizer:
    try:
        found = load_tokenizer(vocabulary)
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}; download {WANTED_TOKENIZER}.") from error
    if (found.vocab_size, found.eos_id) != (_VOCAB_SIZE, _EOS_ID):
        raise ValueError(
            f"{vocabulary} is not GPT-2's vocabulary of the ids 0 to {_EOS_ID}, the last of them "
            f"an end of text; download {WANTED_TOKENIZER}."
        )
    return found


def _pieces(
    record: int, tokens: np.ndarray, decoder: Tokenizer, *, name: str, start: Place
) -> Iterator[Piece]:
    """The texts between the ends of text that are not empty."""
    for number, part in enumerate(np.split(tokens, np.flatnonzero(tokens == _EOS_ID))):
        place = Place(record, number)
        if place >= start and (text := decoder.decode(part[part != _EOS_ID])):
            yield Piece(place, text, f"{name}:{record + 1}")
