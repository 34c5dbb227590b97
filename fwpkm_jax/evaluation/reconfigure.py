"""A trained model under another configuration that has the same parameters."""

import dataclasses

from flax import nnx

from fwpkm_jax.layers.rotary import YarnConfig
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


def with_yarn(model: LanguageModel, *, factor: float | None, original_length: int) -> LanguageModel:
    """The model with the same parameters and YaRN's factor in every attention layer.

    Args:
      model: the model as trained.
      factor: ratio of the new context length to the original one; None returns the model unchanged.
      original_length: length of the original context in tokens.

    References: Peng et al. 2023, arXiv:2309.00071.
    """
    if factor is None:
        return model
    yarn = YarnConfig(factor=factor, original_length=original_length)
    attention = dataclasses.replace(model.config.attention, yarn=yarn)
    lact = dataclasses.replace(model.config.lact, yarn=yarn)
    config = dataclasses.replace(model.config, attention=attention, lact=lact)
    return reconfigure(model, config)


def without_memory_layers(model: LanguageModel) -> LanguageModel:
    """The model without its memory layers: what the residual stream carries past them is the rest.

    Its memory is `{}`.
    """
    bare = nnx.clone(model)  # Of the same classes, whatever they are.
    for block in bare.blocks:
        block.memory = block.memory_mixer = block.memory_mixer_norm = None
    bare.config = dataclasses.replace(model.config, memory_layers=(), memory_mixer=None)
    return bare
