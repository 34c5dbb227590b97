"""Decoder language models with fast-weight and product-key memories."""

from fwpkm_jax.models.block import Block
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import LMOutput, Stream, StreamOutput
from fwpkm_jax.models.parameters import ParameterCount, count_parameters

__all__ = [
    "Block",
    "LMOutput",
    "LanguageModel",
    "ModelConfig",
    "ParameterCount",
    "Stream",
    "StreamOutput",
    "count_parameters",
]
