"""A bundle: all that an audit found, with hashes, commands, and what the headline is made of.

A folder of `audit.html` (the page), `audit.json` (its lines), `answers.jsonl` (one line for every
question and condition, from which the headline is computed) and `manifest.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fwpkm_jax.audit.lines import Line
from fwpkm_jax.audit.origin import Answer, headline, origin_lines
from fwpkm_jax.audit.page import page
from fwpkm_jax.evaluation.display.html import save_page
from fwpkm_jax.evaluation.sources import sha256
from fwpkm_jax.io.atomic import own_folder, replacing, write_json
from fwpkm_jax.io.untrusted import (
    OutsideFileError,
    bounded_lines,
    open_file,
    parse_json,
    read_json,
    reading,
)

_KIND = "fwpkm audit bundle 1"
_FILES = ("audit.html", "audit.json", "answers.jsonl")
_AGAIN = "audit the run again"


def write_bundle(
    folder: Path,
    lines: Sequence[Line],
    answers: Sequence[Answer],
    *,
    title: str,
    provenance: Mapping[str, Any],
) -> Path:
    """Writes the four files; returns the page.

    Args:
      folder: made if it is missing; files of an earlier audit are replaced.
      lines: of the audit.
      answers: behind the lines of where answers come from.
      title: of the page.
      provenance: JSON values: what was audited, its hashes, the command, the environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own_folder(folder)
    again = ["fwpkm", "audit", str(folder)]
    told = headline(answers)
    shown = page(
        lines, title=title, headline=told, provenance={**provenance, "headline again": again}
    )
    save_page(shown, folder / "audit.html")
    write_json(
        folder / "audit.json",
        {"title": title, "headline": told, "lines": [dataclasses.asdict(line) for line in lines]},
    )
    with replacing(folder / "answers.jsonl") as file:
        for answer in answers:
            file.write(json.dumps(answer._asdict()).encode() + b"\n")
    write_json(
        folder / "manifest.json",
        {
            "kind": _KIND,
            "provenance": dict(provenance),
            "headline_again": again,
            "files": {name: sha256(folder / name) for name in _FILES},
        },
    )
    return folder / "audit.html"


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a bundle."""
    path = folder / "manifest.json"
    return path.is_file() and read_json(path, kind=dict).get("kind") == _KIND


def recomputed(folder: Path) -> tuple[str, list[Line]]:
    """Headline and lines of where answers come from, computed again from a bundle's answers.

    Raises:
      OutsideFileError: a file is not the one that the manifest names, or what it holds gives
        another headline or other lines.
    """
    manifest = read_json(folder / "manifest.json", kind=dict)
    with reading(folder / "manifest.json", problem="is no manifest", otherwise=_AGAIN):
        for name in _FILES:
            if sha256(folder / name) != manifest["files"][name]:
                raise OutsideFileError(
                    folder / name, "is not the file that the manifest names", otherwise=_AGAIN
                )
    answers = list(_answers(folder / "answers.jsonl"))
    stored = read_json(folder / "audit.json", kind=dict)
    found, lines = headline(answers), origin_lines(answers)
    with reading(folder / "audit.json", problem="is no audit", otherwise=_AGAIN):
        told = {(line["section"], line["name"]): line for line in stored["lines"]}
        same = found == stored["headline"] and all(
            told[line.section, line.name] == json.loads(json.dumps(dataclasses.asdict(line)))
            for line in lines
        )
    if not same:
        raise OutsideFileError(
            folder / "audit.json",
            f"says {stored['headline']!r}, and its answers give {found!r}",
            otherwise=_AGAIN,
        )
    return found, lines


def _answers(path: Path) -> list[Answer]:
    found = []
    with open_file(path) as file:
        for number, line in enumerate(bounded_lines(file, path, otherwise=_AGAIN), start=1):
            place = f"line {number}"
            record = parse_json(line, path, place=place, kind=dict)
            with reading(path, place=place, problem="is no answer", otherwise=_AGAIN):
                found.append(Answer(**record))
    return found
