"""LAMBADA's training novels: the archive as published, its contents, or their Parquet copy."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from fwpkm_jax.data.documents import Place
from fwpkm_jax.data.prepare.command import AbstractSource
from fwpkm_jax.data.prepare.sources import FilePart, Part, Source, select
from fwpkm_jax.data.streams.files import LocalFile
from fwpkm_jax.data.streams.formats import Piece, read_text
from fwpkm_jax.data.tokenizers import Tokenizer
from fwpkm_jax.outside_files import OutsideFileError, reading
from fwpkm_jax.paper.data.parquet import parquet_parts

WANTED = (
    "lambada-dataset.tar.gz of zenodo.org/records/2630551, or plain_text/train-*.parquet of "
    "huggingface.co/datasets/cimec/lambada"
)

_FOLDER = "train-novels"
_INNER = f"{_FOLDER}.tar"
_MAX_BYTES = 2**26  # Much larger than any novel; an archive with a larger file is not LAMBADA's.


@dataclass(frozen=True, kw_only=True)
class Lambada(AbstractSource):
    """LAMBADA's training novels: the archive, the folder train-novels, or Parquet files."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        yield self.out, lambada(self.input), None


@dataclass(frozen=True)
class NovelArchive:
    """The novels of a tar archive, in its order, read without unpacking it.

    Novels are regular files `train-novels/GENRE/NAME.txt`; other files are skipped.
    """

    path: Path
    name: str

    @property
    def files(self) -> dict[str, LocalFile]:
        return {self.name: LocalFile(str(self.path), self.path)}

    def count(self) -> int:
        with self._opened() as archive:
            return sum(1 for _ in self._novels(archive))

    def read(self, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
        del tokenizer
        with self._opened() as archive:
            for number, (member, content) in enumerate(self._novels(archive)):
                if number >= start.record and (text := self._text(content, member).strip()):
                    yield Piece(Place(number), text, member.name)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tarfile.TarFile]:
        way_out = f"download {WANTED} again"
        with (
            reading(self.path, problem="is not a complete tar archive", otherwise=way_out),
            tarfile.open(self.path, "r|*") as archive,
        ):
            yield archive

    def _novels(self, archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
        for member in archive:
            name = PurePosixPath(member.name)
            if not member.isfile():
                continue
            content = archive.extractfile(member)
            assert content is not None  # A regular file has contents.
            if name.name == _INNER:
                with tarfile.open(fileobj=content, mode="r|") as novels:
                    yield from self._novels(novels)
                return
            if _is_novel(name):
                yield member, content

    def _text(self, content: IO[bytes], member: tarfile.TarInfo) -> str:
        place = f"member {member.name}"
        if member.size > _MAX_BYTES:
            problem = f"holds {member.size:,} bytes, more than any novel"
            raise OutsideFileError(self.path, problem, place, f"download {WANTED}")
        encoded = content.read()
        with reading(self.path, place=place, problem="is not UTF-8"):
            return encoded.decode("utf-8-sig")


@dataclass(frozen=True)
class NovelFolder:
    """The novels `GENRE/NAME.txt` of an unpacked archive, sorted by path."""

    path: Path
    name: str

    @property
    def files(self) -> dict[str, LocalFile]:
        novels = sorted(file for file in self.path.glob("*/*.txt") if file.name[0] != ".")
        return {x.relative_to(self.path).as_posix(): LocalFile(str(x), x) for x in novels}

    def count(self) -> int:
        return len(self.files)

    def read(self, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
        del tokenizer
        for number, (name, file) in enumerate(self.files.items()):
            if number >= start.record and (text := read_text(file.path).strip()):
                yield Piece(Place(number), text, name)


def lambada(path: str | Path) -> Source:
    """The training novels, with white space at their ends removed as in the Parquet copy.

    Archive, Parquet files and folder have different orders: that of the archive, of the rows, and
    sorted by path.

    Args:
      path: `lambada-dataset.tar.gz`, the `train-novels.tar` in it, the folder `train-novels`, or
        Parquet files.

    Raises:
      FileNotFoundError: it holds no novels.
    """
    address, path = str(path), Path(path).expanduser()
    parts: Sequence[Part]
    if path.is_file() and path.suffix != ".parquet":
        parts = [NovelArchive(path, path.name)]
    elif path.is_dir() and NovelFolder(path, path.name).files:
        parts = [NovelFolder(path, path.name)]
    elif path.is_dir() and (files := sorted(path.rglob("train-*.parquet"))):
        parts = [FilePart(LocalFile(str(x), x), x.relative_to(path).as_posix()) for x in files]
    else:
        parts = parquet_parts(address, wanted=WANTED)
    return Source(name="lambada", spans=select(parts))


def _is_novel(name: PurePosixPath) -> bool:
    in_place = len(name.parts) >= 3 and name.parts[-3] == _FOLDER
    return in_place and name.suffix == ".txt" and name.name[0] != "."
