"""Rotary position embedding, and the ways to stretch it to longer contexts.

Entry i of the first half of the rotated dimensions pairs with entry i of the second half; the
pair is rotated by `position * frequency_i`, so that scores depend on position differences only.

References: Su et al. 2021, arXiv:2104.09864; Peng et al. 2023, arXiv:2309.00071 (YaRN);
Chen et al. 2023, arXiv:2306.15595 (linear scaling); Grattafiori et al. 2024, arXiv:2407.21783
(Llama 3).
"""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.literals import Bound, Count, Positive, check_fields


class RotaryFrequencies(NamedTuple):
    """Angle per token of each pair in radians, `[rotary_dim / 2]`; factor on cosine and sine."""

    frequencies: np.ndarray
    scale: float


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Stretches rotary frequencies so that a model reads contexts longer than its training's.

    Fast frequencies stay, slow ones are divided by `factor`, with a linear ramp between.
    """

    factor: Annotated[float, Bound(1)]  # Below 1 it would shorten contexts.
    """How many times longer than `original_length` the context becomes; 1 changes nothing."""
    original_length: Count = 1024
    """Tokens of the original context. The paper's configuration says 1024, though it trained on
    4096; the choice moves the ramp."""
    beta_fast: float = 32.0
    """Frequencies that turn more often than this over the original context stay as they are."""
    beta_slow: float = 1.0
    """Frequencies that turn less often than this over the original context are divided by
    `factor`."""
    attention_factor: Positive | None = None
    """Factor on cosine and sine; its square is one on the scores. None: 1 + log(factor) / 10."""
    truncate: bool = True
    """Rounds the ends of the ramp outwards to whole pairs."""

    def __post_init__(self):
        check_fields(self)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow={self.beta_slow} must be positive and below "
                f"beta_fast={self.beta_fast}; the usual values are 1 and 32."
            )

    def scaled(self, frequencies: np.ndarray, theta: float) -> RotaryFrequencies:
        """The frequencies of the longer context; `theta` is their base."""
        number = len(frequencies)

        def pair_turning(times: float) -> float:
            """The (fractional) pair that turns so many times over the original context."""
            length = self.original_length / (2 * math.pi * times)
            return number * math.log(length) / math.log(theta)

        # Bounds are rounded outwards to whole pairs, then clipped, as in the published code.
        start, end = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            start, end = math.floor(start), math.ceil(end)
        start, end = max(start, 0), min(end, 2 * number - 1)
        pairs = np.arange(number, dtype=np.float64)
        slow = np.clip((pairs - start) / max(end - start, 1e-3), 0, 1)
        scale = self.attention_factor
        if scale is None:
            scale = 0.1 * math.log(self.factor) + 1
        return RotaryFrequencies(frequencies * (1 - slow) + frequencies / self.factor * slow, scale)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's stretching: slow frequencies are divided by `factor`, with a ramp to the fast ones.

    The ramp is linear in the frequency, unlike YaRN's, and nothing else is scaled.
    """

    factor: Annotated[float, Bound(1)]  # Below 1 it would shorten contexts.
    """By how much slow frequencies are divided."""
    low_freq_factor: float = 1.0
    """Frequencies that turn less often than this over the original context are divided whole."""
    high_freq_factor: float = 4.0
    """Frequencies that turn more often than this over the original context stay as they are."""
    original_length: Count = 8192
    """Tokens of the original context."""

    def __post_init__(self):
        check_fields(self)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be positive and below "
                f"high_freq_factor={self.high_freq_factor}; the usual values are 1 and 4."
            )

    def scaled(self, frequencies: np.ndarray, theta: float) -> RotaryFrequencies:
        """The frequencies of the longer context."""
        turns = self.original_length * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        # Frequencies between both bounds are mixed, so that none jumps.
        fast = np.clip((turns - low) / (high - low), 0, 1)
        return RotaryFrequencies(frequencies * (fast + (1 - fast) / self.factor), 1.0)


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
      scaling: for longer contexts; a number divides all frequencies.

    Raises:
      ValueError: `rotary_dim` is odd or not positive.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim} must be even and positive.")
    pairs = np.arange(rotary_dim // 2, dtype=np.float64)
    # In float64 at trace time, rounded once where they are used.
    frequencies = theta ** (-2 * pairs / rotary_dim)
    if isinstance(scaling, YarnConfig | Llama3Scaling):
        return scaling.scaled(frequencies, theta)
    return RotaryFrequencies(frequencies / (scaling or 1.0), 1.0)


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
    # At least float32: bfloat16 lacks integers beyond 256, so that positions would coincide.
    angles = positions.astype(dtype)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles) * rotary.scale, jnp.sin(angles) * rotary.scale
    first, second = x[..., :half].astype(dtype), x[..., half : 2 * half].astype(dtype)
    # Halves are pairs, as in GPT-NeoX and Llama of Hugging Face; not neighbours.
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
