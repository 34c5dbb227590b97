"""Initial values of learned decays."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

DecayStart = Literal["time_steps", "constant"]
"""Initial decays. time_steps: drawn, different for each head. constant: one bias for all heads."""

SHORTEST_STEP, LONGEST_STEP = 1e-3, 0.1
"""The range of time steps at the start in published layers, from Mamba (arXiv:2312.00752) on."""


def draw_time_steps(rng: jax.Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Time steps that are log-uniform between `SHORTEST_STEP` and `LONGEST_STEP`, float32.

    At rate 1 a memory keeps the share `exp(-step)` at each token, so that heads initially remember
    10 to 1,000 tokens.
    """
    low, high = math.log(SHORTEST_STEP), math.log(LONGEST_STEP)
    return jnp.exp(jax.random.uniform(rng, shape, jnp.float32, low, high))


def softplus_bias(step: Float[Array, "..."]) -> Float[Array, "..."]:
    """The bias whose softplus is the time step."""
    # log(exp(step) - 1), in a form that neither overflows nor cancels.
    return step + jnp.log(-jnp.expm1(-step))


def sigmoid_bias(step: Float[Array, "..."]) -> Float[Array, "..."]:
    """The bias whose sigmoid is the share `exp(-step)` that is kept over a time step."""
    return -jnp.log(jnp.expm1(step))


def logit(share: Float[Array, "..."]) -> Float[Array, "..."]:
    """The bias whose sigmoid is the share."""
    return jnp.log(share) - jnp.log1p(-share)


def bias_initializer(
    start: DecayStart, constant: float, of_step: Callable[[Array], Array] | None
) -> Callable[..., Array]:
    """Makes a gate's bias from a random key, a shape and a dtype.

    Args:
      start: how the initial decays are chosen.
      constant: the bias for start="constant", and for a gate that controls no decay.
      of_step: the bias that gives a time step; None for a gate that controls no decay.
    """

    def initialize(rng: jax.Array, shape: tuple[int, ...], dtype: Any, *_: Any) -> Array:
        if start == "constant" or of_step is None:
            return jnp.full(shape, constant, dtype)
        return of_step(draw_time_steps(rng, shape)).astype(dtype)

    return initialize
