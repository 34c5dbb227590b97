"""A mixer and the samples that its contract is checked with."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.layers.mixers.base import AbstractMixer, AbstractMixerConfig

LENGTH, BATCH = 15, 2
"""Of the samples."""


class MixerCase:
    """A mixer with sampled tokens; its call is compiled once for each piece length."""

    def __init__(self, config: AbstractMixerConfig, model_dim: int, init_std: float):
        self.config, self.model_dim, self.init_std = config, model_dim, init_std

    def build(self, dtype: Any = None, *, scale: float = 1.0) -> AbstractMixer:
        """A new mixer, its weights drawn with `scale` times `init_std`; the same in every call."""
        std = scale * self.init_std
        return self.config.build(
            self.model_dim, norm_eps=1e-5, init_std=std, dtype=dtype, rngs=nnx.Rngs(0)
        )

    def sample(self, length: int = LENGTH, *, seed: int = 0, dtype: Any = np.float64) -> jax.Array:
        """Random tokens `[batch, length, model]`."""
        rng = np.random.default_rng(seed)
        return jnp.asarray(rng.normal(size=(BATCH, length, self.model_dim)), dtype)

    @functools.cached_property
    def mixer(self) -> AbstractMixer:
        return self.build()

    @functools.cached_property
    def call(self) -> Callable[..., tuple[jax.Array, Any]]:
        """`mixer(x, mask=, cache=)`, compiled for each shape."""
        mixer = self.mixer
        return jax.jit(lambda x, mask, cache: mixer(x, mask=mask, cache=cache))

    @functools.cached_property
    def whole(self) -> np.ndarray:
        """The output of the sampled tokens."""
        return np.asarray(self.call(self.sample(), None, None)[0])

    def stream(
        self, x: Any, lengths: Iterable[int], mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[Any]]:
        """Concatenated outputs of a stream's pieces, and the caches: initial, then after each."""
        x = np.asarray(x)  # Cut on the host, which compiles nothing.
        cache = self.mixer.init_cache(len(x), max_length=LENGTH, dtype=x.dtype)
        outputs, caches, start = [], [cache], 0
        for length in lengths:
            piece = slice(start, start + length)
            output, cache = self.call(x[:, piece], None if mask is None else mask[:, piece], cache)
            outputs.append(np.asarray(output))
            caches.append(cache)
            start += length
        return np.concatenate(outputs, axis=1), caches
