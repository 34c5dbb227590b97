"""A trained model with its rotary positions stretched to longer contexts."""

from __future__ import annotations

import dataclasses

from fwpkm_jax.evaluation.reconfigure import reconfigure
from fwpkm_jax.layers.rotary import YarnConfig
from fwpkm_jax.models.language_model import LanguageModel


def with_yarn(model: LanguageModel, *, factor: float | None, original_length: int) -> LanguageModel:
    """The model with the same parameters and YaRN's factor in every attention layer.

    Args:
      model: as trained.
      factor: how many times longer contexts become; None leaves the model as it is.
      original_length: tokens of the original context.

    References: Peng et al. 2023, arXiv:2309.00071.
    """
    if factor is None:
        return model
    yarn = YarnConfig(factor=factor, original_length=original_length)
    attention = dataclasses.replace(model.config.attention, yarn=yarn)
    lact = dataclasses.replace(model.config.lact, yarn=yarn)
    config = dataclasses.replace(model.config, attention=attention, lact=lact)
    return reconfigure(model, config)
