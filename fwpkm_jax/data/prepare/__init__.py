"""Converts downloaded text to tokenised files: one reader per source, one resumable writer.

`python -m fwpkm_jax.data.prepare SOURCE --input ... --out ...` downloads no files;
docs/howto/data.md says what to download and from where.
"""

from fwpkm_jax.data.prepare.job import Layout, Manifest, prepare
from fwpkm_jax.data.prepare.records import Part, Record, Source, Span, select

__all__ = ["Layout", "Manifest", "Part", "Record", "Source", "Span", "prepare", "select"]
