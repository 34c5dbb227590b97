"""LAMBADA's training novels: a folder of texts, or their Parquet copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fwpkm_jax.data.json_lines import Place
from fwpkm_jax.data.prepare.command import AbstractSource
from fwpkm_jax.data.prepare.sources import FilePart, Source, file_parts, select
from fwpkm_jax.data.streams.formats import Piece, read_text
from fwpkm_jax.data.tokenizers import Tokenizer
from fwpkm_jax.paper.data.parquet import parquet_parts

WANTED = (
    "plain_text/train-*.parquet of huggingface.co/datasets/cimec/lambada, or unpack "
    "lambada-dataset.tar.gz of zenodo.org/records/2630551 and the train-novels.tar in it"
)


@dataclass(frozen=True, kw_only=True)
class Lambada(AbstractSource):
    """LAMBADA's training novels: the unpacked folder train-novels, or the Parquet files."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        yield self.out, lambada(self.input), None


@dataclass(frozen=True)
class Novel(FilePart):
    """A text without the white space at its ends, as in the Parquet copy."""

    def read(self, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
        del tokenizer
        if text := read_text(Path(self.file.name)).strip():
            yield Piece(start, text, self.name)


def lambada(path: str | Path) -> Source:
    """The training novels; the orders of folder and Parquet files differ.

    Args:
      path: the folder `train-novels` of `GENRE/NAME.txt`, read sorted by path; or Parquet files,
        of a folder with several splits those of training.

    Raises:
      FileNotFoundError, ValueError: it holds no novels.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and any(folder.glob("*/*.txt")):
        parts = [Novel(part.file, part.name) for part in file_parts(path)]
    elif folder.is_dir() and any(folder.glob("train-*.parquet")):
        parts = parquet_parts(f"{path}/train-*.parquet", wanted=WANTED)
    else:
        parts = parquet_parts(path, wanted=WANTED)
    return Source(name="lambada", spans=select(parts))
