"""A token mixer: a gated moving average of the tokens, with a learned rate for each channel."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.layers import declare_linear, parameter
from fwpkm_jax.layers.mixers import AbstractMixer, AbstractMixerConfig


@dataclass(frozen=True, kw_only=True)
class MovingAverageConfig(AbstractMixerConfig):
    """The mixer's configuration."""

    start: float = 0.7
    """Share of the average that a token keeps, before training."""

    def __post_init__(self) -> None:
        if not 0 < self.start < 1:
            raise ValueError(f"start={self.start} must lie between 0 and 1.")

    def build(
        self, model_dim: int, *, norm_eps: float, init_std: float, dtype: Any, rngs: nnx.Rngs
    ) -> "MovingAverage":
        """The mixer with new parameters; it has no norm."""
        del norm_eps
        return MovingAverage(self, model_dim, init_std=init_std, dtype=dtype, rngs=rngs)


class MovingAverage(AbstractMixer):
    """Averages what came before, channel by channel:

    average_t = keep * average_{t-1} + (1 - keep) * v_t,    y_t = W_o (sigmoid(g_t) average_t)
    """

    def __init__(
        self,
        config: MovingAverageConfig,
        model_dim: int,
        *,
        init_std: float,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        def linear(inputs: str | None, outputs: str | None) -> nnx.Linear:
            return nnx.Linear(
                *(model_dim, model_dim),
                use_bias=False,
                kernel_init=nnx.initializers.normal(init_std),
                dtype=dtype,
                rngs=rngs,
                **declare_linear(inputs, outputs),
            )

        self.value_proj, self.gate_proj = linear("embed", None), linear("embed", None)
        self.o_proj = linear(None, "embed")
        logit = jnp.log(config.start / (1 - config.start))
        self.rate = parameter(jnp.full((model_dim,), logit, jnp.float32), "gate")

    def init_cache(self, batch: int, *, max_length: int, dtype: Any) -> jax.Array:
        """An average of zeros, `[batch, model]`; its size does not depend on the length."""
        del max_length
        return jnp.zeros((batch, self.rate.shape[0]), jnp.promote_types(dtype, jnp.float32))

    def mix(
        self, x: jax.Array, *, mask: jax.Array | None = None, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        """The gated averages; padding keeps the average and yields zeros."""
        average = cache
        if average is None:
            average = self.init_cache(x.shape[0], max_length=1, dtype=x.dtype)
        real = jnp.ones(x.shape[:2], bool) if mask is None else mask.astype(bool)
        keep = jax.nn.sigmoid(self.rate[...]).astype(average.dtype)
        values = self.value_proj(x).astype(average.dtype)

        def step(average: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
            value, real = token
            new = keep * average + (1 - keep) * value
            average = jnp.where(real[:, None], new, average)
            return average, average

        average, averages = jax.lax.scan(step, average, (values.swapaxes(0, 1), real.T))
        gated = jax.nn.sigmoid(self.gate_proj(x)) * averages.swapaxes(0, 1).astype(x.dtype)
        y = jnp.where(real[..., None], self.o_proj(gated), 0)
        return y, None if cache is None else average

    @property
    def output_map(self) -> nnx.Linear:
        """The linear map into the residual stream."""
        return self.o_proj
