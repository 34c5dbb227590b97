"""Texts of several domains, each with a part to adapt to and a part to evaluate on."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fwpkm_jax.data import TextData
from fwpkm_jax.data.packing import PackedRows
from fwpkm_jax.data.streams.names import KINDS
from fwpkm_jax.evaluation.sources import file_hashes, read_rows
from fwpkm_jax.literals import some


class Part(NamedTuple):
    """Some rows of a text: `indices` into `rows`."""

    rows: PackedRows
    indices: range


class Domain(NamedTuple):
    """A named text: one part to adapt to, one to evaluate on."""

    name: str
    adapt: Part
    evaluate: Part
    files: dict[str, str]
    """SHA-256 of each file, by path."""


def read_domains(named_paths: Sequence[str], data: TextData) -> list[Domain]:
    """The domains that a command line names.

    Args:
      named_paths: each `NAME=PATH`, or `PATH`, whose last component without suffix is then the
        name. A path is a folder that contains `train` and `valid` (each a text, a tokenised file or
        a folder), or one file. Of a file's rows, the first half is adapted to and the second half
        is evaluated on.
      data: how texts are tokenised and how long rows are; its own texts are not read.

    Raises:
      ValueError: there is no domain, a name occurs twice, or a folder lacks a part.
      FileNotFoundError: a path does not exist.
    """
    if not named_paths:
        raise ValueError("domains=() names no text; give NAME=PATH for each domain, in order.")
    domains = [_read_domain(named_path, data) for named_path in named_paths]
    names = [domain.name for domain in domains]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"Two domains are called {name!r}; give them names, as in math=PATH.")
    return domains


def _read_domain(named_path: str, data: TextData) -> Domain:
    given, _, place = named_path.rpartition("=")
    path = Path(place).expanduser()
    if path.is_dir():
        parts = [_find_part(path, name) for name in ("train", "valid")]
        texts = [read_rows(part, data) for part in parts]
        adapt, evaluate = (Part(rows, range(len(rows))) for rows in texts)
        files = {name: digest for part in parts for name, digest in file_hashes(part).items()}
    else:
        rows = read_rows(path, data)
        middle = len(rows) // 2
        adapt, evaluate = Part(rows, range(middle)), Part(rows, range(middle, len(rows)))
        files = file_hashes(path)
    return Domain(given or path.stem, adapt, evaluate, files)


def _find_part(folder: Path, name: str) -> Path:
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.name in (name, *(f"{name}{kind}" for kind in KINDS))
    ]
    if len(found) != 1:
        there = some([str(path) for path in found]) or "none"
        raise ValueError(
            f"A domain's folder needs one {name}{{{','.join(KINDS)}}}, {folder} has {there}; "
            "name a file to take its halves."
        )
    return found[0]
