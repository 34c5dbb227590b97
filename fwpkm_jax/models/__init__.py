"""Decoder language models with fast-weight and product-key memories."""

from fwpkm_jax.models.block import Block
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import LMOutput, Stream, StreamOutput

__all__ = [
    "Block",
    "LMOutput",
    "LanguageModel",
    "ModelConfig",
    "Stream",
    "StreamOutput",
]
