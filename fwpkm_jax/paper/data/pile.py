"""Domains of the Pile, for learning one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fwpkm_jax.data.json_lines import Place
from fwpkm_jax.data.prepare.command import AbstractSource
from fwpkm_jax.data.prepare.sources import FilePart, Source, file_parts, select
from fwpkm_jax.data.streams.formats import Piece
from fwpkm_jax.data.streams.tables import column_texts, read_batches
from fwpkm_jax.data.tokenizers import Tokenizer
from fwpkm_jax.io.untrusted import OutsideFileError

WANTED = (
    "Parquet files of huggingface.co/datasets/monology/pile-uncopyrighted-parquet, from the first "
    "on as many as the rarest domain needs"
)
DOMAINS = (
    "DM Mathematics",
    "FreeLaw",
    "PhilPapers",
    "PubMed Central",
    "Ubuntu IRC",
    "USPTO Backgrounds",
)
"""The paper's six, in its order."""
_DOMAIN = "meta.pile_set_name"


@dataclass(frozen=True, kw_only=True)
class Pile(AbstractSource):
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
            yield self.folder / file_name(domain), source, self.max_characters


@dataclass(frozen=True)
class DomainPart(FilePart):
    """The rows of a Parquet file whose `meta.pile_set_name` is the domain."""

    domain: str = ""

    def read(self, tokenizer: Tokenizer, start: Place) -> Iterator[Piece]:
        columns, name = [self.field, _DOMAIN], self.file.short_name
        batches = read_batches(self.file, columns, start.record, wanted=self._is_in)
        for first, batch in batches:
            if "meta" not in batch.schema.names:
                problem = f"has no column {_DOMAIN!r}"
                raise OutsideFileError(self.file.name, problem, otherwise=f"download {WANTED}")
            domains = _domains(batch)
            texts = column_texts(self.file, batch, self.field, first=first, start=start.record)
            for row, text in texts:
                if domains[row - first] == self.domain:
                    yield Piece(Place(row), text, f"{name}:{row + 1}")

    def _is_in(self, file: Any, group: int) -> bool:
        """Whether the domain is in a row group: reads the column of names alone."""
        found = file.read_row_group(group, columns=[_DOMAIN])
        return "meta" not in found.schema.names or self.domain in _domains(found)


def pile_domain(path: str | Path, domain: str) -> Source:
    """The documents whose `meta.pile_set_name` is `domain`, in file order.

    Raises:
      FileNotFoundError: there are no Parquet files.
      ValueError: the domain is none of the paper's six.
    """
    if domain not in DOMAINS:
        raise ValueError(f"domain={domain!r} is not one of {', '.join(DOMAINS)}.")
    way_out = f"download {WANTED} (docs/howto/data.md)."
    try:
        files = [part for part in file_parts(path) if part.file.kind == ".parquet"]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no {path}; {way_out}") from error
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}; {way_out}") from error
    if not files:
        raise FileNotFoundError(f"{path} holds no Parquet file; {way_out}")
    parts = [DomainPart(part.file, part.name, part.field, domain) for part in files]
    return Source(name="pile", spans=select(parts), settings={"domain": domain})


def file_name(domain: str) -> str:
    """`dm_mathematics.bin` for "DM Mathematics"."""
    return domain.lower().replace(" ", "_") + ".bin"


def _domains(table: Any) -> list[str | None]:
    """`meta.pile_set_name` of each row of a pyarrow batch or table."""
    return [meta and meta["pile_set_name"] for meta in table.column("meta").to_pylist()]
