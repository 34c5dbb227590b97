"""Exports and imports weights: folders of this package, and of the transformers library (`hf`).

Imported weights become a run directory, which `fwpkm train`, `eval` and `generate` accept like any
other.
"""

from fwpkm_jax.interchange.imported_run import start_run
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.interchange.weights_folder import export_run, read_folder

__all__ = ["Weights", "export_run", "read_folder", "start_run"]
