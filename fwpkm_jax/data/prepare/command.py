"""The command `python -m fwpkm_jax.data.prepare SOURCE`, which writes tokenised files."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fwpkm_jax.command_line import report
from fwpkm_jax.data.longbench import TASKS
from fwpkm_jax.data.prepare.fineweb_edu import fineweb_edu
from fwpkm_jax.data.prepare.job import prepare
from fwpkm_jax.data.prepare.lambada import lambada
from fwpkm_jax.data.prepare.longbench import longbench_task
from fwpkm_jax.data.prepare.longcrawl64 import longcrawl64
from fwpkm_jax.data.prepare.output import Layout
from fwpkm_jax.data.prepare.pile import DOMAINS, file_name, pile_domain
from fwpkm_jax.data.prepare.records import Source
from fwpkm_jax.data.prepare.text_files import text_files
from fwpkm_jax.data.tokenizers import MISTRAL_V1, load_tokenizer
from fwpkm_jax.literals import check_literals
from fwpkm_jax.typed_options import read_options

_PROGRAM = "fwpkm_jax.data.prepare"


@dataclass(frozen=True, kw_only=True)
class _AbstractCommand(abc.ABC):
    input: Path
    """The downloaded file or folder. The command itself downloads no files; docs/howto/data.md says
    where to get them."""
    out: Path
    """The .bin file to write; its index and manifest get the same name. Sources of several files
    take a folder."""
    layout: Layout = "l4096"
    """l4096: rows of 4097 tokens of all documents laid end to end, for training, gates and the
    Pile. stream: one entry per document, for streaming perplexity."""
    tokenizer: str = MISTRAL_V1
    """"mistral-v1" (the paper's 32,000 pieces), "bytes", or a SentencePiece .model file."""
    max_tokens: int | None = None
    """Stop after the entry that reaches this many tokens; the paper's test files take 8192000."""
    num_threads: int = os.cpu_count() or 1
    """Threads of the tokenizer."""
    save_seconds: float = 30.0
    """Least time between two points from which a killed command can continue."""

    def __post_init__(self) -> None:
        check_literals(self)

    @abc.abstractmethod
    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        """Each file to write, its source and its limit of characters."""


@dataclass(frozen=True, kw_only=True)
class FineWebEdu(_AbstractCommand):
    """FineWeb-Edu's 10BT sample: the folder of its Parquet files."""

    split: Literal["train", "valid", "test"]
    """train: the first 9,000,000 documents. valid, test: the first and the last 10,000 of the
    last 100,000."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        yield self.out, fineweb_edu(self.input, split=self.split), None


@dataclass(frozen=True, kw_only=True)
class _AbstractRanged(_AbstractCommand):
    skip_documents: int = 0
    """Leave out this many records at the start."""
    max_documents: int | None = None
    """Take at most this many records."""

    @property
    def stop(self) -> int | None:
        """Number of the first record after those to read."""
        return None if self.max_documents is None else self.skip_documents + self.max_documents


@dataclass(frozen=True, kw_only=True)
class LongCrawl64(_AbstractRanged):
    """LongCrawl64: a Zarr folder or a flat .bin file of GPT-2 tokens, tokenised anew."""

    vocabulary: Path
    """GPT-2's encoder.json."""
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


@dataclass(frozen=True, kw_only=True)
class Lambada(_AbstractCommand):
    """LAMBADA's training novels: the archive, the folder train-novels, or Parquet files."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        yield self.out, lambada(self.input), None


@dataclass(frozen=True, kw_only=True)
class Pile(_AbstractCommand):
    """Domains of the Pile: the folder of its Parquet files, to a folder of one file per domain."""

    domains: tuple[str, ...] = DOMAINS
    """Domains to write; the paper's six by default."""
    max_characters: int = 80_000_000
    """Stop a domain after the document that reaches this many characters."""
    max_tokens: int | None = 8_192_000
    """Stop a domain after the entry that reaches this many tokens."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        for domain in self.domains:
            source = pile_domain(self.input, domain)
            yield _folder(self.out) / file_name(domain), source, self.max_characters


@dataclass(frozen=True, kw_only=True)
class LongBench(_AbstractCommand):
    """LongBench's question-answering tasks: data.zip, to a folder of one file per task."""

    tasks: tuple[str, ...] = TASKS
    """Tasks to write; the paper's five by default."""
    layout: Literal["stream"] = "stream"
    """Three entries per sample: context block, question block, answer; no end of document."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        tokenizer = load_tokenizer(self.tokenizer)
        for task in self.tasks:
            source = longbench_task(self.input, task, tokenizer=tokenizer)
            yield _folder(self.out) / f"{task}.bin", source, None


@dataclass(frozen=True, kw_only=True)
class JsonLines(_AbstractRanged):
    """Any .jsonl or .txt file, or a folder of them."""

    field: str = "text"
    """Field of a .jsonl record that holds the text."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        source = text_files(self.input, field=self.field, start=self.skip_documents, stop=self.stop)
        yield self.out, source, None


def _folder(out: Path) -> Path:
    if out.suffix == ".bin":
        raise ValueError(f"--out {out} is to be a folder: this source gives several .bin files.")
    return out


_Command = (
    Annotated[FineWebEdu, tyro.conf.subcommand("fineweb_edu")]
    | Annotated[LongCrawl64, tyro.conf.subcommand("longcrawl64")]
    | Annotated[Lambada, tyro.conf.subcommand("lambada")]
    | Annotated[Pile, tyro.conf.subcommand("pile")]
    | Annotated[LongBench, tyro.conf.subcommand("longbench")]
    | Annotated[JsonLines, tyro.conf.subcommand("jsonl")]
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    try:
        command: _AbstractCommand = read_options(_Command, arguments, program=_PROGRAM)
        for out, source, max_characters in command.jobs():
            prepare(
                source,
                out=out,
                tokenizer=command.tokenizer,
                layout=command.layout,
                max_tokens=command.max_tokens,
                max_characters=max_characters,
                num_threads=command.num_threads,
                save_seconds=command.save_seconds,
            )
    except (ValueError, OSError, ImportError) as error:
        return report(_PROGRAM, error)
    return 0
