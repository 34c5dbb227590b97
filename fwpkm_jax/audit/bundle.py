"""A bundle: all that an audit found, with hashes, commands, and what the headline is made of.

A folder of `audit.html` (the page), `audit.json` (its lines), `answers.jsonl` (one line for every
question and condition, from which the headline is computed) and `manifest.json`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from fwpkm_jax.audit.lines import Line
from fwpkm_jax.audit.origin import Answer, figures, headline, origin_lines
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
    shown,
    size_of,
)

_KIND = "fwpkm audit bundle 1"
_FILES = ("audit.html", "audit.json", "answers.jsonl")
_AGAIN = "audit the run again"
_MOST_BYTES = 2**26  # Of each file.
_MOST_NUMBER = 2**40  # Of positions, and of nats.


class Recomputed(NamedTuple):
    """What the answers of a bundle say.

    Attributes:
      headline: the sentence at the top of the page.
      figures: numbers that no check judges, by name.
      lines: the controls.
    """

    headline: str
    figures: dict[str, str]
    lines: list[Line]


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
    told = {"headline": headline(answers), "figures": figures(answers)}
    markup = page(lines, title=title, provenance={**provenance, "headline again": again}, **told)
    save_page(markup, folder / "audit.html")
    found = {"title": title, **told, "lines": [dataclasses.asdict(line) for line in lines]}
    write_json(folder / "audit.json", found)
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


def recomputed(folder: Path) -> Recomputed:
    """What a bundle's answers say, computed again.

    Raises:
      OutsideFileError: a file is not the one that the manifest names, is too long, or what it holds
        gives another headline, other figures or other lines.
    """
    manifest = read_json(folder / "manifest.json", kind=dict)
    for name in _FILES:
        if size_of(folder / name, otherwise=_AGAIN) > _MOST_BYTES:
            problem = f"has more than {_MOST_BYTES:,} bytes"
            raise OutsideFileError(folder / name, problem, otherwise=_AGAIN)
        with reading(folder / "manifest.json", problem="is no manifest", otherwise=_AGAIN):
            if sha256(folder / name) != manifest["files"][name]:
                problem = "is not the file that the manifest names"
                raise OutsideFileError(folder / name, problem, otherwise=_AGAIN)
    answers = _answers(folder / "answers.jsonl")
    stored = read_json(folder / "audit.json", kind=dict, most=_MOST_BYTES)
    with reading(folder / "answers.jsonl", problem="has no answers to judge", otherwise=_AGAIN):
        found = Recomputed(headline(answers), figures(answers), origin_lines(answers))
    with reading(folder / "audit.json", problem="is no audit", otherwise=_AGAIN):
        told = {(line["section"], line["name"]): line for line in stored["lines"]}
        theirs = [told[line.section, line.name] for line in found.lines]
        ours = [dataclasses.asdict(line) for line in found.lines]
        same = json.dumps([stored["headline"], stored["figures"], theirs], sort_keys=True) == (
            json.dumps([found.headline, found.figures, ours], sort_keys=True)
        )
    if not same:
        problem = f"says {stored['headline']!r}, and its answers give {found.headline!r}"
        raise OutsideFileError(folder / "audit.json", problem, otherwise=_AGAIN)
    return found


def _answers(path: Path) -> list[Answer]:
    found = []
    with open_file(path) as file:
        for number, line in enumerate(bounded_lines(file, path, otherwise=_AGAIN), start=1):
            place = f"line {number}"
            record = parse_json(line, path, place=place, kind=dict)
            with reading(path, place=place, problem="is no answer", otherwise=_AGAIN):
                found.append(_checked(Answer(**record)))
    return found


def _checked(answer: Answer) -> Answer:
    """The answer; raises ValueError for a value of another kind or outside of its range."""
    for name, kind in get_type_hints(Answer).items():
        value = getattr(answer, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = isinstance(value, kind) and (number or not isinstance(value, int) or kind is bool)
        if kind is float:
            share = name != "nats"
            fits = number and (0 <= value <= 1 if share else not abs(value) > _MOST_NUMBER)
        elif number:
            fits = fits and 0 <= value <= _MOST_NUMBER
        if not fits:
            raise ValueError(f"{name} is {shown(json.dumps(value), 40)}")
    return answer
