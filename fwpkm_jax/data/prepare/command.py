"""The command `python -m fwpkm_jax.data.prepare SOURCE`, which writes tokenised files."""

import abc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fwpkm_jax.data.prepare.job import prepare
from fwpkm_jax.data.prepare.output import Layout
from fwpkm_jax.data.prepare.sources import Source, text_files
from fwpkm_jax.data.tokenizers import MISTRAL_V1
from fwpkm_jax.io.options import read_options
from fwpkm_jax.io.terminal import report
from fwpkm_jax.lazy_imports import LazyRegistry
from fwpkm_jax.literals import Checked, nearest

_PROGRAM = "fwpkm_jax.data.prepare"
_PAPER = "fwpkm_jax.paper.data"


@dataclass(frozen=True, kw_only=True)
class AbstractSource(Checked, abc.ABC):
    """What to write down, and how: the options of every source."""

    input: str
    """The file or folder, or its address in a bucket or on the hub; docs/howto/data.md says where
    to get what."""
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

    @property
    def folder(self) -> Path:
        """`out`, of a source that gives several files."""
        if self.out.suffix == ".bin":
            raise ValueError(
                f"--out {self.out} is to be a folder: this source gives several .bin files."
            )
        return self.out

    @abc.abstractmethod
    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        """Each file to write, its source and its limit of characters."""


@dataclass(frozen=True, kw_only=True)
class AbstractRange(AbstractSource):
    """A source of which a range of documents can be taken."""

    skip_documents: int = 0
    """Leave out this many records at the start; below 0: all but so many at the end."""
    max_documents: int | None = None
    """Take at most this many records."""

    @property
    def stop(self) -> int | None:
        """Number of the first record after those to read."""
        return None if self.max_documents is None else self.skip_documents + self.max_documents


@dataclass(frozen=True, kw_only=True)
class TextFiles(AbstractRange):
    """Any text that training reads: a file, a folder, a bucket or a data set of the hub."""

    field: str = "text"
    """Field of a record that holds the text."""

    def jobs(self) -> Iterator[tuple[Path, Source, int | None]]:
        source = text_files(self.input, field=self.field, start=self.skip_documents, stop=self.stop)
        yield self.out, source, None


SOURCES = LazyRegistry(
    {
        "text": f"{__name__}:TextFiles",
        "longcrawl64": f"{_PAPER}.longcrawl64:LongCrawl64",
        "pile": f"{_PAPER}.pile:Pile",
    }
)
"""The class of each source, by name."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    try:
        name, *others = arguments or ["--help"]
        if name in ("-h", "--help"):
            print(f"usage: {_PROGRAM} SOURCE --input PATH --out PATH [options]\n\nsources:")
            for name in SOURCES:
                print(f"  {name:12} {(SOURCES[name].__doc__ or '').strip()}")
            return 0
        if name not in SOURCES:
            raise ValueError(f"{name!r} is none of {', '.join(SOURCES)}{nearest(name, SOURCES)}.")
        command: AbstractSource = read_options(SOURCES[name], others, program=f"{_PROGRAM} {name}")
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
