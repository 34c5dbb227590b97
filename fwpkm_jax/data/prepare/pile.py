"""Domains of the Pile, for learning one after the other."""

from __future__ import annotations

from pathlib import Path

from fwpkm_jax.data.prepare.parquet import parquet_parts
from fwpkm_jax.data.prepare.records import Source, select

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


def pile_domain(path: str | Path, domain: str) -> Source:
    """The documents whose `meta.pile_set_name` is `domain`, in file order.

    Raises:
      FileNotFoundError: there are no Parquet files.
      ValueError: the domain is none of the paper's six.
    """
    if domain not in DOMAINS:
        raise ValueError(f"domain={domain!r} is not one of {', '.join(DOMAINS)}.")
    parts = parquet_parts(Path(path).expanduser(), wanted=WANTED, domain=domain)
    return Source(name="pile", spans=select(parts), settings={"domain": domain})


def file_name(domain: str) -> str:
    """`dm_mathematics.bin` for "DM Mathematics"."""
    return domain.lower().replace(" ", "_") + ".bin"
