"""A mixer of a third party that defines nothing beyond what the contract requires."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.layers.mixers.base import AbstractMixer, AbstractMixerConfig


@dataclass(frozen=True, kw_only=True)
class RunningSumConfig(AbstractMixerConfig):
    """No settings."""

    def build(self, model_dim: int, **shared: Any) -> "RunningSum":
        del model_dim, shared
        return RunningSum()


class RunningSum(AbstractMixer):
    """A sum that a token bends before it is added, so that no parts of it can be composed."""

    def mix(self, x, *, mask=None, starts=None, cache=None):
        assert mask is None
        state = self.init_cache(len(x), max_length=1, dtype=x.dtype) if cache is None else cache
        state = jnp.broadcast_to(state, x[:, 0].shape)
        starts = jnp.zeros(x.shape[:2], bool) if starts is None else starts

        def step(state, token):
            x, start = token
            state = jnp.where(start[:, None], 0, state)
            state = jnp.tanh(state + x * jnp.cos(state))
            return state, state

        state, y = jax.lax.scan(step, state, (x.swapaxes(0, 1), starts.swapaxes(0, 1)))
        return y.swapaxes(0, 1), None if cache is None else state

    def init_cache(self, batch, *, max_length, dtype):
        del max_length
        return jnp.zeros((batch, 8), dtype)
