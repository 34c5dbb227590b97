"""FineWeb-Edu's sample of ten billion tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fwpkm_jax.data.prepare.command import AbstractSource
from fwpkm_jax.data.prepare.sources import FilePart, Source, select
from fwpkm_jax.paper.data.parquet import parquet_parts

WANTED = "the 14 files sample/10BT/*.parquet of huggingface.co/datasets/HuggingFaceFW/fineweb-edu"

_LAST_FILE = 13


@dataclass(frozen=True, kw_only=True)
class FineWebEdu(AbstractSource):
    """FineWeb-Edu's 10BT sample: the folder of its Parquet files."""

    split: Literal["train", "valid", "test"]
    """train: the first 9,000,000 documents. valid, test: the first and the last 10,000 of the
    last 100,000."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        yield self.out, fineweb_edu(self.input, split=self.split), None


def fineweb_edu(
    path: str | Path,
    *,
    split: Literal["train", "valid", "test"],
    train_documents: int = 9_000_000,
    held_out_documents: int = 100_000,
    evaluation_documents: int = 10_000,
) -> Source:
    """The documents of a split, in file order; the splits are those of the paper's release.

    Train are the first `train_documents`. Of the last `held_out_documents` of the sample the first
    `evaluation_documents` are valid and the last as many are test.

    Args:
      path: the folder of the sample's files.
      split: "train" needs the first files without a gap, the others need the last.
      train_documents: at most this many; held-out documents are never among them.
      held_out_documents: number of documents at the end of the sample that are not for training.
      evaluation_documents: size of each of valid and test.

    Raises:
      FileNotFoundError: there are no Parquet files.
      ValueError: files that the split needs are missing, or have other names.
    """
    parts = parquet_parts(path, wanted=WANTED)
    numbers = [_file_number(part) for part in parts]
    has_end = numbers[-1] == _LAST_FILE
    total = sum(part.count() for part in parts) if has_end else None
    if split == "train":
        if numbers != list(range(len(numbers))):
            raise ValueError(
                f"{path} holds the files number {numbers}: the training documents come first, so "
                f"no file may be missing before the last. Download {WANTED}."
            )
        start, stop = 0, train_documents
        if total is not None:
            stop = min(stop, total - held_out_documents)
    else:
        if total is None:
            raise ValueError(
                f"{path} lacks 0{_LAST_FILE}_00000.parquet, the end of the sample, which {split} "
                f"is taken from. Download {WANTED}."
            )
        start = total - (held_out_documents if split == "valid" else evaluation_documents)
        stop = start + evaluation_documents
        if start < 0:
            raise ValueError(
                f"{path} holds {total} documents, fewer than the {held_out_documents} that "
                f"{split} is taken from. Download {WANTED}."
            )
    return Source(
        name="fineweb_edu",
        spans=select(parts, start=start, stop=stop),
        settings={"split": split},
    )


def _file_number(part: FilePart) -> int:
    if (match := re.fullmatch(r"(\d{3})_\d{5}\.parquet", part.file.short_name)) is None:
        raise ValueError(
            f"{part.file.name} is not named as the sample's files are, 000_00000.parquet and so "
            f"on. Download {WANTED}."
        )
    return int(match[1])
