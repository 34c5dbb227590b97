"""Checkpoints of the paper's authors: read as weights or as a run; weights in their names."""

from fwpkm_jax.paper.release.conversion import from_release, read_release, to_release
from fwpkm_jax.paper.release.importing import import_release

__all__ = ["from_release", "import_release", "read_release", "to_release"]
