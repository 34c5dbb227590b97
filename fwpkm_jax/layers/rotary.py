"""Rotary position embedding, and the ways to stretch it to longer contexts.

Entry i of the first half of the rotated dimensions pairs with entry i of the second half; the
pair is rotated by `position * frequency_i`, so that scores depend on position differences only.

References: Su et al. 2021, arXiv:2104.09864; Peng et al. 2023, arXiv:2309.00071 (YaRN);
Chen et al. 2023, arXiv:2306.15595 (linear scaling); Grattafiori et al. 2024, arXiv:2407.21783
(Llama 3).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.literals import check_bounds


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Stretches rotary frequencies so that a model reads contexts longer than its training's.

    Fast frequencies stay, slow ones are divided by `factor`, with a linear ramp between.
    """

    factor: float
    """How many times longer than `original_length` the context becomes; 1 changes nothing."""
    original_length: int = 1024
    """Tokens of the original context. The paper's configuration says 1024, though it trained on
    4096; the choice moves the ramp."""
    beta_fast: float = 32.0
    """Frequencies that turn more often than this over the original context stay as they are."""
    beta_slow: float = 1.0
    """Frequencies that turn less often than this over the original context are divided by
    `factor`."""
    attention_factor: float | None = None
    """Factor on cosine and sine; its square is one on the scores. None: 1 + log(factor) / 10."""
    truncate: bool = True
    """Rounds the ends of the ramp outwards to whole pairs."""

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"factor={self.factor} would shorten the context; use 1 or more.")
        check_bounds(self, "original_length", least=1)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow={self.beta_slow} must be positive and below "
                f"beta_fast={self.beta_fast}; the usual values are 1 and 32."
            )
        check_bounds(self, "attention_factor", above=0)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's stretching: slow frequencies are divided by `factor`, with a ramp to the fast ones.

    The ramp is linear in the frequency, unlike YaRN's, and nothing else is scaled.
    """

    factor: float
    """By how much slow frequencies are divided."""
    low_freq_factor: float = 1.0
    """Frequencies that turn less often than this over the original context are divided whole."""
    high_freq_factor: float = 4.0
    """Frequencies that turn more often than this over the original context stay as they are."""
    original_length: int = 8192
    """Tokens of the original context."""

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"factor={self.factor} would shorten the context; use 1 or more.")
        check_bounds(self, "original_length", least=1)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be positive and below "
                f"high_freq_factor={self.high_freq_factor}; the usual values are 1 and 4."
            )


class RotaryFrequencies(NamedTuple):
    """Angle per token of each pair in radians, `[rotary_dim / 2]`; factor on cosine and sine."""

    frequencies: np.ndarray
    scale: float


def rotary_frequencies(
    rotary_dim: int,
    *,
    theta: float,
    scaling: YarnConfig | Llama3Scaling | float | None = None,
) -> RotaryFrequencies:
    """Frequencies `theta^(-2i / rotary_dim)`, in float64 and known at trace time.

    Args:
      rotary_dim: number of rotated dimensions; even.
      theta: base of the frequencies.
      scaling: how positions are stretched to longer contexts; a number divides all frequencies.

    Raises:
      ValueError: `rotary_dim` is odd or not positive.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim} must be even and positive.")
    pairs = np.arange(rotary_dim // 2, dtype=np.float64)
    frequencies = theta ** (-2 * pairs / rotary_dim)
    if scaling is None:
        return RotaryFrequencies(frequencies, 1.0)
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_length * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        fast = np.clip((turns - low) / (high - low), 0, 1)
        return RotaryFrequencies(frequencies * (fast + (1 - fast) / scaling.factor), 1.0)
    if not isinstance(scaling, YarnConfig):
        return RotaryFrequencies(frequencies / scaling, 1.0)
    yarn = scaling

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns so many times over the original context."""
        length = yarn.original_length / (2 * math.pi * times)
        return rotary_dim * math.log(length) / (2 * math.log(theta))

    # Bounds are rounded outwards to whole pairs, then clipped, as in the published code.
    start, end = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, rotary_dim - 1)
    stretched = np.clip((pairs - start) / max(end - start, 1e-3), 0, 1)
    frequencies = frequencies * (1 - stretched) + frequencies / yarn.factor * stretched
    if yarn.attention_factor is not None:
        return RotaryFrequencies(frequencies, yarn.attention_factor)
    return RotaryFrequencies(frequencies, 0.1 * math.log(yarn.factor) + 1)


def apply_rotary(
    x: Float[Array, "batch length heads head"],
    positions: Int[Array, "batch length"],
    *,
    rotary: RotaryFrequencies,
) -> Float[Array, "batch length heads head"]:
    """The vectors with their first `2 * len(rotary.frequencies)` entries rotated by position.

    Args:
      x: queries or keys `[batch, length, heads, head]`.
      positions: of each token, `[batch, length]`.
      rotary: from `rotary_frequencies`.

    Returns:
      Same shape and dtype as `x`; angles, cosines and sines are taken in at least float32.

    Raises:
      ValueError: the head is narrower than the rotated dimensions.
    """
    half = len(rotary.frequencies)
    if x.shape[-1] < 2 * half:
        raise ValueError(f"{2 * half} dimensions turn, but the head has only {x.shape[-1]}.")
    dtype = compute_dtype(x.dtype)
    frequencies = jnp.asarray(rotary.frequencies, dtype)
    angles = positions.astype(dtype)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles) * rotary.scale, jnp.sin(angles) * rotary.scale
    first, second = x[..., :half].astype(dtype), x[..., half : 2 * half].astype(dtype)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
