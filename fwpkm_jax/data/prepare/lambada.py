"""LAMBADA's training novels: the archive as published, its contents, or their Parquet copy."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from fwpkm_jax.data.documents import decode_utf8, read_text
from fwpkm_jax.data.prepare.parquet import parquet_parts
from fwpkm_jax.data.prepare.records import Part, Record, Source, select

WANTED = (
    "lambada-dataset.tar.gz of zenodo.org/records/2630551, or plain_text/train-*.parquet of "
    "huggingface.co/datasets/cimec/lambada"
)

_FOLDER = "train-novels"
_INNER = f"{_FOLDER}.tar"
_MAX_BYTES = 2**26  # Much larger than any novel; an archive with a larger file is not LAMBADA's.


@dataclass(frozen=True)
class NovelArchive:
    """The novels of a tar archive, in its order, read without unpacking it.

    Novels are regular files `train-novels/GENRE/NAME.txt`; other files are skipped.
    """

    path: Path
    name: str

    @property
    def files(self) -> dict[str, Path]:
        return {self.name: self.path}

    def count(self) -> int:
        return sum(1 for _ in self.read(0))

    def read(self, start: int) -> Iterator[Record]:
        try:
            with tarfile.open(self.path, "r|*") as archive:
                yield from self._read(archive, start)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(
                f"{self.path} is not a complete tar archive ({error}); download {WANTED} again."
            ) from error

    def _read(self, archive: tarfile.TarFile, start: int) -> Iterator[Record]:
        position = 0
        for member in archive:
            name = PurePosixPath(member.name)
            if not member.isfile():
                continue
            content = archive.extractfile(member)
            assert content is not None  # A regular file has contents.
            if name.name == _INNER:
                with tarfile.open(fileobj=content, mode="r|") as novels:
                    yield from self._read(novels, start)
                return
            if _is_novel(name):
                position += 1
                if position > start:
                    yield _novel(position, self._text(content, member))

    def _text(self, content: IO[bytes], member: tarfile.TarInfo) -> str:
        if member.size > _MAX_BYTES:
            raise ValueError(
                f"{self.path}: {member.name} holds {member.size} bytes, more than any novel; "
                f"download {WANTED}."
            )
        return decode_utf8(content.read(), name=f"{self.path}: {member.name}")


@dataclass(frozen=True)
class NovelFolder:
    """The novels `GENRE/NAME.txt` of an unpacked archive, sorted by path."""

    path: Path
    name: str

    @property
    def files(self) -> dict[str, Path]:
        novels = sorted(file for file in self.path.glob("*/*.txt") if file.name[0] != ".")
        return {file.relative_to(self.path).as_posix(): file for file in novels}

    def count(self) -> int:
        return len(self.files)

    def read(self, start: int) -> Iterator[Record]:
        novels = list(self.files.values())
        for position, file in enumerate(novels[start:], start=start + 1):
            yield _novel(position, read_text(file))


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
    path = Path(path).expanduser()
    parts: list[Part]
    if path.is_file() and path.suffix != ".parquet":
        parts = [NovelArchive(path, path.name)]
    elif path.is_dir() and NovelFolder(path, path.name).files:
        parts = [NovelFolder(path, path.name)]
    elif path.is_dir() and (files := sorted(path.rglob("train-*.parquet"))):
        parts = [part for file in files for part in parquet_parts(file, wanted=WANTED)]
    else:
        parts = list(parquet_parts(path, wanted=WANTED))
    return Source(name="lambada", spans=select(parts))


def _novel(position: int, text: str) -> Record:
    text = text.strip()
    return Record(position, (text,) if text else ())


def _is_novel(name: PurePosixPath) -> bool:
    in_place = len(name.parts) >= 3 and name.parts[-3] == _FOLDER
    return in_place and name.suffix == ".txt" and name.name[0] != "."
