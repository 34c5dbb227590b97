"""Folders of the transformers library: read as runs, and written from them."""

from fwpkm_jax.interchange.hf.exported import export_model, push_model
from fwpkm_jax.interchange.hf.imported import import_model
from fwpkm_jax.interchange.hf.model_folder import ModelFolder, open_folder, read_weights
from fwpkm_jax.interchange.hf.settings import model_config

__all__ = [
    "ModelFolder",
    "export_model",
    "import_model",
    "model_config",
    "open_folder",
    "push_model",
    "read_weights",
]
