"""The dense feed-forward layer, and the activations that layers may use."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.layers.parameters import linear_map

HIDDEN = "mlp_hidden"
"""Name of both products of an MLP before its activation, for rematerialisation."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""gelu is the exact one, gelu_tanh its usual approximation."""

ACTIVATIONS: Mapping[Activation, Callable[..., jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""The functions by their names in configurations."""


class SwiGLU(nnx.Module):
    """`down(SiLU(gate(x)) * up(x))`, or with another activation in place of SiLU.

    References: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        *,
        init_std: float = 0.02,
        activation: Activation = "silu",
        bias: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Draws the weights, which are float32.

        Args:
          model_dim: width of input and output.
          hidden_dim: hidden units.
          init_std: standard deviation of the initial weights; biases start at zero.
          activation: of the gate.
          bias: adds a bias in each of the three maps.
          dtype: of the computation, None for the input's.
          rngs: the stream `params`.
        """
        self.activation: Activation = activation
        options: dict[str, Any] = {"init_std": init_std, "use_bias": bias, "dtype": dtype}
        linear = partial(linear_map, **options, rngs=rngs)
        self.gate_proj = linear(model_dim, hidden_dim, "embed", "mlp")
        self.up_proj = linear(model_dim, hidden_dim, "embed", "mlp")
        self.down_proj = linear(hidden_dim, model_dim, "mlp", "embed")

    def __call__(self, x: Float[Array, "*dims model"]) -> Float[Array, "*dims model"]:
        gate = checkpoint_name(self.gate_proj(x), HIDDEN)
        up = checkpoint_name(self.up_proj(x), HIDDEN)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)
