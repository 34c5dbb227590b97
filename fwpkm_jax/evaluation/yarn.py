"""A trained model with its rotary positions stretched to longer contexts."""

from __future__ import annotations

import dataclasses

from fwpkm_jax.evaluation.reconfigure import reconfigure
from fwpkm_jax.layers.rotary import YarnConfig
from fwpkm_jax.models.language_model import LanguageModel


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
