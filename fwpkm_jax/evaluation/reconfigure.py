"""A trained model under another configuration that has the same parameters."""

from __future__ import annotations

import dataclasses
import functools

import jax
from flax import nnx

from fwpkm_jax.core.slots.retention import init_history
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.rules import AbstractChunkRule, FwPKM
from fwpkm_jax.rules.arguments import check_memory


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
      memory: of the model's memory layers, leaves `[groups, ...]`. A history that the retention of
        an `FwPKM` needs begins here; one of another retention is left out.
      rule: of the same sizes as the model's own.

    Raises:
      ValueError: the memory is not of the rule's sizes.
    """
    fast_weight = dataclasses.replace(model.config.fast_weight, rule=rule)
    if isinstance(rule, FwPKM):
        retention = rule.retention
        begin = None if retention is None else functools.partial(init_history, retention)
        memory = {
            layer: one._replace(history=begin and jax.vmap(begin)(one.keys, one.values))
            for layer, one in memory.items()
        }
    for one in memory.values():
        check_memory(rule, one, groups=True)
    model = reconfigure(model, dataclasses.replace(model.config, fast_weight=fast_weight))
    return model, memory
