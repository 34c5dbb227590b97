"""A small mixer with faults to plant, each of which breaks a property."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.layers import declare, parameter
from fwpkm_jax.layers.mixers import AbstractMixer, AbstractMixerConfig


@dataclass(frozen=True, kw_only=True)
class SmallMixerConfig(AbstractMixerConfig):
    fault: str = ""

    def build(self, model_dim, *, norm_eps, init_std, dtype, rngs):
        del norm_eps
        return SmallMixer(self.fault, model_dim, init_std, dtype, rngs)


class SmallMixer(AbstractMixer):
    """Adds up half of the sum so far and each real token, times a matrix."""

    def __init__(self, fault, model_dim, init_std, dtype, rngs):
        self.fault, self.dtype = fault, dtype
        kernel = init_std * jax.random.normal(rngs.params(), (model_dim, model_dim), jnp.float32)
        if fault == "bfloat16_parameters":
            kernel = kernel.astype(jnp.bfloat16)
        self.kernel = parameter(kernel, "matrix", ("embed", "heads"))
        if fault == "shared_buffer":
            self.other = parameter(kernel, "matrix", ("embed", "heads"))
        if fault == "unused_parameter":
            self.extra = parameter(jnp.ones(1, jnp.float32), "scale")
        if fault == "undeclared_parameter":
            self.extra = nnx.Param(jnp.ones(1, jnp.float32))
        if fault == "axes_of_other_rank":
            self.extra = nnx.Param(jnp.ones((1, 1, 1)), **declare("scale", ("embed",)))

    def init_cache(self, batch, *, max_length, dtype):
        del max_length
        return jnp.zeros((batch, self.kernel.shape[0]), dtype)

    def mix(self, x, *, mask=None, starts=None, cache=None):
        starts = jnp.zeros(x.shape[:2], bool) if starts is None else starts
        if self.fault == "ignores_documents":
            starts = jnp.zeros_like(starts)
        mask = jnp.ones(x.shape[:2], x.dtype) if mask is None else mask.astype(x.dtype)
        shown = jnp.ones_like(mask) if self.fault == "sees_padding" else mask
        state = self.init_cache(x.shape[0], max_length=1, dtype=x.dtype)
        if cache is not None and self.fault != "forgets_the_cache":
            state = cache
        if self.fault == "reads_the_future":
            state = state + 0.1 * x[:, -1]
        if self.fault == "reads_other_sequences":
            x = x + 0.1 * jnp.mean(x, axis=0, keepdims=True)

        def step(state, token):
            x, real, shown, start = token
            state = jnp.where(start[:, None], 0, state)
            new = 0.5 * state + x
            keep = (real if self.fault != "decays_at_padding" else shown * 0 + 1)[:, None] > 0
            seen = (shown > 0)[:, None]
            state = jnp.where(keep, jnp.where(seen, new, 0.5 * state), state)
            return state, state

        tokens = (x.swapaxes(0, 1), shown.T, shown.T, starts.T)
        state, sums = jax.lax.scan(step, state, tokens)
        if self.fault == "own_token_unread":
            sums = sums - x.swapaxes(0, 1)
        kernel = self.kernel[...].astype(x.dtype)
        y = sums.swapaxes(0, 1) @ kernel
        if self.fault == "infinite_gradient":
            y = y + jnp.sqrt(0.0 * jnp.sum(y**2, axis=-1, keepdims=True))
        if self.fault != "padding_gives_numbers":
            y = y * mask[..., None]
        if self.fault == "float32_outputs":
            y = y.astype(jnp.float32)
        if self.fault == "float32_cache":
            state = state.astype(jnp.float32)
        if self.fault == "always_a_cache":
            return y, state
        return y, None if cache is None else state

    def reset_cache(self, cache):
        return cache if self.fault == "reset_keeps_the_sum" else super().reset_cache(cache)
