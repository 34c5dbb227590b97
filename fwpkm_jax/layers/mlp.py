"""The dense feed-forward layer."""

from typing import ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.layers.partition import ParameterAxes


class SwiGLU(nnx.Module):
    """`down(SiLU(gate(x)) * up(x))`, without biases.

    References: Shazeer 2020, arXiv:2002.05202.
    """

    parameter_axes: ClassVar[ParameterAxes] = {
        "(gate|up)_proj/kernel": ("embed", "mlp"),
        "down_proj/kernel": ("mlp", "embed"),
    }

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        *,
        init_std: float = 0.02,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Args: `dtype` of the computation, None for the input's; parameters are float32."""

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            init = nnx.initializers.normal(init_std)
            return nnx.Linear(
                inputs, outputs, use_bias=False, dtype=dtype, kernel_init=init, rngs=rngs
            )

        self.gate_proj = linear(model_dim, hidden_dim)
        self.up_proj = linear(model_dim, hidden_dim)
        self.down_proj = linear(hidden_dim, model_dim)

    def __call__(self, x: Float[Array, "*dims model"]) -> Float[Array, "*dims model"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
