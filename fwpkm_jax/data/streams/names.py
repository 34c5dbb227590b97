"""Which files of a folder are read: one choice for this machine, buckets and the hub."""

import fnmatch
import logging
import re
from collections.abc import Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Protocol, TypeVar

from fwpkm_jax.io.untrusted import MOST_JSON_BYTES, OutsideFileError, parse_json, reading
from fwpkm_jax.literals import some


class NamedFile(Protocol):
    """What a choice among files needs of each."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def short_name(self) -> str:
        """Its name without folders."""
        ...

    def open(self) -> IO[bytes]:
        """The content."""
        ...


File = TypeVar("File", bound=NamedFile)

KINDS = (".jsonl", ".txt", ".bin", ".jsonl.gz", ".parquet", ".arrow")
"""Kinds of files that are read."""
PACKAGED = "package:"
"""Prefix of paths inside the installed package."""

_KINDS = some(KINDS)
_SPLITS = {"train": "train", "test": "test", "valid": "valid", "validation": "valid", "dev": "dev"}
_CACHE = "cache-*.arrow"  # What `datasets` writes beside a data set.
_SAVE = "save the data set again"
_LOGGER = logging.getLogger(__name__)


def kind_of(path: str | Path) -> str:
    """The end of a file's name in small letters, as `.txt` or `.jsonl.gz`."""
    name = str(path).lower()
    return ".jsonl.gz" if name.endswith(".jsonl.gz") else PurePath(name).suffix


def fixed_part(pattern: str) -> str:
    """The folders of a pattern before its first wildcard; all of a path without any."""
    parts = pattern.split("/")
    wild = (n for n, part in enumerate(parts) if any(x in part for x in "*?["))
    return "/".join(parts[: next(wild, len(parts))]).rstrip("/")


def is_named(name: str, pattern: str) -> bool:
    """Whether a name is a path, lies below it, or fits it as a pattern."""
    pattern = pattern.rstrip("/")
    below = not pattern or name == pattern or name.startswith(f"{pattern}/")
    return below or fnmatch.fnmatchcase(name, pattern)


def below(name: str, folder: str) -> str:
    return name.removeprefix(folder).lstrip("/")


def chosen(files: Mapping[str, File], where: str) -> list[File]:
    """The files to read of those below a folder or pattern, by their names below it.

    Raises:
      ValueError: there is none, one of no kind that is read, a hidden one, a text in two forms, or
        several splits of a data set.
    """
    if (file := files.get("")) is not None:  # Named itself.
        if kind_of(file.name) not in KINDS:
            raise ValueError(f"{file.name} is not a {_KINDS} file; rename or convert it.")
        return [file]
    files = _without_caches(files, where)
    names = sorted((x for x in files if kind_of(x) in KINDS), key=PurePosixPath)
    for name in filter(_is_hidden, names):
        raise ValueError(
            f"{files[name].name} is hidden, so it is hardly meant to be read; delete it, or name "
            f"the files and folders of {where} that are."
        )
    stems = {(name.removesuffix(kind_of(name)), kind_of(name)) for name in names}
    # An index or a manifest belongs to the tokenised file beside it.
    others = [
        repr(x)
        for x in sorted(files)
        if kind_of(x) not in KINDS
        and not _is_hidden(x)
        and not (kind_of(x) in (".idx", ".json") and (x.rpartition(".")[0], ".bin") in stems)
    ]
    if not names:
        there = f", only {some(others)}; unpack what is compressed, or" if others else ";"
        raise ValueError(f"{where} holds no {_KINDS} file{there} name another.")
    if others:
        _LOGGER.warning(
            "%s: %d files are read. Passed over, as no text that is read: %s.",
            *(where, len(names), some(others)),
        )
    for stem, kind in sorted(stems):
        twins = {".bin": set(KINDS) - {".bin"}, ".jsonl.gz": {".jsonl"}}.get(kind, set())
        for twin in (x for x in sorted(twins) if (stem, x) in stems):
            raise ValueError(
                f"{where} holds {stem}{twin} and {stem}{kind}, which reads as the same text twice; "
                "name the files to use, or rename one."
            )
    stated = {name: split for name in names if (split := _split(name)) is not None}
    splits = {split: name for name, split in stated.items()}
    if len(splits) > 1 and len(stated) >= len(names) / 2:  # Else they are words of titles.
        raise ValueError(
            f"{where} holds several splits, as {some([repr(x) for x in sorted(splits.values())])}; "
            f"name one, as {where}/{_pattern(splits.get('train', names[0]))}."
        )
    return [files[name] for name in names]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _without_caches(files: Mapping[str, File], where: str) -> dict[str, File]:
    """The files without those that describe a data set of `save_to_disk`, and without its caches.

    Raises:
      ValueError: a data set has several splits, or lacks a file that it names.
    """
    left = {
        name: file
        for name, file in files.items()
        if not fnmatch.fnmatchcase(PurePosixPath(name).name, _CACHE)
    }
    for name, file in files.items():
        folder = PurePosixPath(name).parent
        if file.short_name == "dataset_dict.json":
            splits = [str(x) for x in _description(file).get("splits", [])]
            raise ValueError(
                f"{where} holds the splits {', '.join(splits)} of a data set; name the folder of "
                f"one, as {where}/{folder / (splits or ['train'])[0]}."
            )
        if file.short_name != "state.json" or "_data_files" not in (found := _description(file)):
            continue
        with reading(file.name, otherwise=_SAVE):
            parts = [str(folder / str(part["filename"])) for part in found["_data_files"]]
        for part in parts:
            if part not in files:
                problem = f"names {PurePosixPath(part).name}, which is not there"
                raise OutsideFileError(file.name, problem, otherwise=_SAVE)
        for beside in [x for x in left if PurePosixPath(x).parent == folder and x not in parts]:
            if kind_of(beside) in (".arrow", ".json"):
                del left[beside]
    return left


def _description(file: NamedFile) -> dict:
    with reading(file.name, otherwise=_SAVE), file.open() as content:
        said = content.read(MOST_JSON_BYTES)
    return parse_json(said, file.name, otherwise=_SAVE, kind=dict)


def _split(name: str) -> str | None:
    """The split that a file's name states, as `data/train-00000-of-00002.parquet` does."""
    words = re.split(r"[/_.-]", name.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def _pattern(name: str) -> str:
    """A pattern for the files of one split, for a message."""
    folder, _, last = name.rpartition("/")
    short = f"{last.split('-')[0]}*" if "-" in last else last
    return f"{folder}/{short}" if folder else short
