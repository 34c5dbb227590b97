"""A trained model under another configuration that has the same parameters."""

from __future__ import annotations

import dataclasses

from flax import nnx

from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.rules import AbstractChunkRule


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


def with_rule(
    model: LanguageModel, memory: Memory, rule: AbstractChunkRule
) -> tuple[LanguageModel, Memory]:
    """A trained model that writes otherwise, and its memory for that.

    Args:
      model: its memory layers get the rule.
      memory: of the model's memory layers, leaves `[groups, ...]`; see
        `AbstractChunkRule.convert_memory`.
      rule: of the same sizes as the model's own.

    Raises:
      ValueError: the memory is not of the rule's sizes.
    """
    memory = {layer: rule.convert_memory(one) for layer, one in memory.items()}
    fast_weight = dataclasses.replace(model.config.fast_weight, rule=rule)
    return reconfigure(model, dataclasses.replace(model.config, fast_weight=fast_weight)), memory


def without_memory_layers(model: LanguageModel) -> LanguageModel:
    """The model without its memory layers: what the residual stream carries past them is the rest.

    Its memory is `{}`.
    """
    bare = nnx.clone(model)  # Of the same classes, whatever they are.
    for block in bare.blocks:
        block.memory = None
    bare.config = dataclasses.replace(model.config, memory_layers=())
    return bare
