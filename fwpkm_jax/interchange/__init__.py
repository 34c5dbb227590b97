"""Exports and imports weights: safetensors folders and checkpoints of the authors' release.

Imported weights become a run directory, which `fwpkm train`, `eval` and `generate` accept like any
other.
"""

from fwpkm_jax.interchange.imported_run import start_run
from fwpkm_jax.interchange.release import from_release, read_release, to_release
from fwpkm_jax.interchange.release_run import import_release
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.interchange.weights_folder import export_run, read_folder

__all__ = [
    "Weights",
    "export_run",
    "from_release",
    "import_release",
    "read_folder",
    "read_release",
    "start_run",
    "to_release",
]
