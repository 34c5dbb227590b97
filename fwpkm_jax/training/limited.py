"""Full attention that sees only a window in most training steps (the paper's pSWA).

The two ways to see share every parameter: a full-attention layer is a sliding-window layer without
the window. So a second structure for the same weights is all it takes, and which one a step uses is
one draw from the step's own key, the same on every device.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel, ModelConfig
from fwpkm_jax.training.state import model_graph


class Limited(NamedTuple):
    """The model's structure for steps that see only the window, and how often they are drawn."""

    graphdef: nnx.GraphDef[LanguageModel]
    probability: float


def limited_attention(config: ModelConfig, probability: float) -> Limited | None:
    """The model with sliding windows in place of full attention, for a share of the steps.

    Args:
      config: the model; its `window` is the one imposed.
      probability: that a step imposes it; 0 gives None.

    Raises:
      ValueError: the model has no full attention to limit.

    References: Zhao and Jones 2026, arXiv:2601.00671, section 4.2.
    """
    if probability == 0:
        return None
    limited = [mixer.in_window(config.window) for mixer in config.mixer_configs]
    if all(mixer is None for mixer in limited):
        raise ValueError(
            f"training.window_probability={probability} limits full attention, and "
            f"mixers={config.mixers} have none; set it to 0."
        )
    mixers = tuple(new or mixer for new, mixer in zip(limited, config.mixers, strict=True))
    return Limited(model_graph(dataclasses.replace(config, mixers=mixers)), probability)


def draw_limited(rng: jax.Array, step: jax.Array, probability: float) -> jax.Array:
    """Whether a step imposes the window: a bool drawn from the run's stream at that step."""
    return jax.random.bernoulli(jax.random.fold_in(rng, step), probability)
