"""Needle samples as files, so that several models or programs answer the same questions.

    python -m fwpkm_jax.evaluation.needle.files --data books.jsonl --words 4000 --out needles.jsonl

The format is JSONL: a header with seed, words and hashes of the texts, then one sample per line.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fwpkm_jax.data import TextData, Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.needle.config import SampleSettings
from fwpkm_jax.evaluation.needle.samples import Needle, NeedleSample, build_samples
from fwpkm_jax.evaluation.sources import Source, files_of, text_sources
from fwpkm_jax.io.atomic import replacing
from fwpkm_jax.io.options import read_options
from fwpkm_jax.io.terminal import report
from fwpkm_jax.io.untrusted import MOST_JSON_BYTES, parse_json, reading
from fwpkm_jax.literals import check_least

_KIND = "needle samples"
_SETTINGS = ("words", "seed", *(field.name for field in dataclasses.fields(SampleSettings)))


@dataclass(frozen=True, kw_only=True)
class SampleOptions(SampleSettings):
    """Writes needle samples of one length to a file."""

    data: tuple[str, ...]
    """Files or folders of text for the haystacks, in order."""
    out: Path
    """File to write."""
    words: int = 4000
    """Whitespace words of a haystack."""
    seed: int = 0
    """Seed of keys, values, depths and targets."""
    samples: int = 500
    """Number of samples; fewer if the text is too short."""
    tokenizer: str = "bytes"
    """Tokenizer of tokenised files (.bin); files of text do not need one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, words=1, samples=1)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be at least 0 and less than {2**32}.")


def texts_of(sources: Sequence[Source], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Pairs of id and text of all documents, in order."""
    for source in sources:
        for document in source.documents():
            yield document.id, tokenizer.decode(document.tokens)


def write_samples(path: Path, samples: Iterable[NeedleSample], header: dict[str, Any]) -> int:
    """Writes a file of samples; returns their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 0
    with replacing(path) as file:
        file.write(json.dumps({"kind": _KIND, **header}).encode() + b"\n")
        for sample in samples:
            number += 1
            target = sample.needles[sample.target]
            record = {
                "haystack": sample.haystack,
                "question": sample.question,
                "question_key": target.key,
                "answer": sample.answer,
                "depth": target.depth,
                "needles": [needle._asdict() for needle in sample.needles],
                "target": sample.target,
                "document": sample.document,
                "words": sample.words,
            }
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    return number


def read_samples(path: str | Path) -> tuple[dict[str, Any], Iterator[NeedleSample]]:
    """The header of a file of samples, and its samples.

    Raises:
      ValueError: the file does not hold needle samples.
      FileNotFoundError: the file does not exist.
    """
    path = Path(path)
    with path.open("rb") as file:
        first = file.readline(MOST_JSON_BYTES)
    header = parse_json(first, path, place="line 1", kind=dict) if first[:1] == b"{" else {}
    if header.get("kind") != _KIND:
        raise ValueError(
            f"{path} holds no needle samples; python -m fwpkm_jax.evaluation.needle.files makes a "
            "file of them."
        )
    return header, _samples_of(path)


def _samples_of(path: Path) -> Iterator[NeedleSample]:
    with path.open("rb") as file:
        for number, line in enumerate(itertools.islice(file, 1, None), start=2):
            place = f"line {number}"
            record = parse_json(line, path, place=place, kind=dict)
            with reading(path, place=place, problem="is no needle sample"):
                sample = NeedleSample(
                    needles=tuple(Needle(**needle) for needle in record["needles"]),
                    **{name: record[name] for name in NeedleSample._fields if name != "needles"},
                )
            yield sample


def write_file(options: SampleOptions) -> int:
    """Writes the file that the options describe; returns the number of samples.

    Raises:
      ValueError: the text gives no samples as asked for.
      OSError: a text cannot be read, or the file not written.
    """
    sources = text_sources(
        TextData(train_paths=options.data, valid_paths=options.data, tokenizer=options.tokenizer)
    )
    texts = texts_of(sources, load_tokenizer(options.tokenizer))
    samples = build_samples(texts, options, words=options.words, seed=options.seed)
    settings = {name: getattr(options, name) for name in _SETTINGS}
    header = {**settings, "data_files": files_of(source.files for source in sources)}
    return write_samples(options.out, itertools.islice(samples, options.samples), header)


def main(arguments: Sequence[str]) -> int:
    """Writes the file that a command line asks for; returns the program's exit code."""
    program = "python -m fwpkm_jax.evaluation.needle.files"
    try:
        options = read_options(SampleOptions, arguments, program=program)
        number = write_file(options)
    except (ValueError, OSError) as error:
        return report("needle.files", error)
    print(f"wrote {number} samples to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
