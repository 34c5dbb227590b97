"""A trained model under another configuration that has the same parameters."""

from __future__ import annotations

import dataclasses

from flax import nnx

from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel


def reconfigure(model: LanguageModel, config: ModelConfig) -> LanguageModel:
    """The parameters of `model` in the structure that `config` describes."""
    structure = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0), dtype=model.dtype))
    return nnx.merge(nnx.split(structure)[0], nnx.split(model)[1])


def with_chunk_size(model: LanguageModel, chunk_size: int | None) -> LanguageModel:
    """The model with `chunk_size` tokens per write in a whole pass; None returns it unchanged."""
    if chunk_size is None:
        return model
    fast_weight = dataclasses.replace(model.config.fast_weight, chunk_size=chunk_size)
    return reconfigure(model, dataclasses.replace(model.config, fast_weight=fast_weight))
