"""Full attention that sees only a window in most training steps (the paper's pSWA).

Full and sliding-window attention have the same parameters. So one set of weights serves two model
structures, one with full attention and one with windows. Each step draws which structure it uses
from its random key, which is the same on every device.
"""

import dataclasses
from typing import NamedTuple

import jax
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel, ModelConfig
from fwpkm_jax.training.state import model_graph


class RandomWindow(NamedTuple):
    """The model's structure for steps with windows, and the probability of such a step."""

    graphdef: nnx.GraphDef[LanguageModel]
    probability: float


def random_window(config: ModelConfig, probability: float) -> RandomWindow | None:
    """The model with sliding windows in place of full attention, for a share of the steps.

    Args:
      config: the model; its `window` is the size of the windows, in tokens.
      probability: probability that a step uses the windows, 0 to 1.

    Returns:
      The second structure and its probability; None if the probability is 0.

    Raises:
      ValueError: the model has no full attention to limit.

    References: Zhao and Jones 2026, arXiv:2601.00671, section 4.2.
    """
    if probability == 0:
        return None
    windowed = [mixer.in_window(config.window) for mixer in config.mixer_configs]
    if all(mixer is None for mixer in windowed):
        raise ValueError(
            f"training.window_probability={probability} limits full attention, and "
            f"mixers={config.mixers} have none; set it to 0."
        )
    mixers = tuple(new or mixer for new, mixer in zip(windowed, config.mixers, strict=True))
    return RandomWindow(model_graph(dataclasses.replace(config, mixers=mixers)), probability)


def draw_window(rng: jax.Array, step: jax.Array, probability: float) -> jax.Array:
    """Whether a step uses the windows: a bool scalar, drawn from the run's random stream."""
    return jax.random.bernoulli(jax.random.fold_in(rng, step), probability)
