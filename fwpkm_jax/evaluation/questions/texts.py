"""Texts that questions are hidden in, and their sentences."""

from __future__ import annotations

import re

from fwpkm_jax.data.documents import read_documents
from fwpkm_jax.data.sample import TRAIN
from fwpkm_jax.evaluation.data_files import local_path
from fwpkm_jax.evaluation.sources import sha256


def read_texts(name: str | None) -> tuple[list[str], dict[str, str]]:
    """The texts of a `.txt` or `.jsonl` file, and its SHA-256 by name.

    Args:
      name: see `local_path`; None: the books of this package, which give no hash.

    Raises: see `local_path` and `read_documents`.
    """
    path = local_path(TRAIN if name is None else name)
    texts = [one.text for one in read_documents(path, field="text")]
    return texts, {} if name is None else {name: sha256(path)}


def sentences_of(text: str) -> list[str]:
    """A text cut after full stops, question and exclamation marks that white space follows."""
    return [one for one in re.split(r"(?<=[.!?])\s+", text.strip()) if one]
