"""Text written down as tokens: the readers of `data.streams`, and one resumable writer.

`python -m fwpkm_jax.data.prepare SOURCE --input ... --out ...`; see docs/howto/data.md.
"""

from fwpkm_jax.data.prepare.job import Layout, Manifest, prepare
from fwpkm_jax.data.prepare.sources import Part, Source, Span, select, text_files

__all__ = ["Layout", "Manifest", "Part", "Source", "Span", "prepare", "select", "text_files"]
