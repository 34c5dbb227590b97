"""The gate that a Titans memory is on the output of attention."""

import jax
from flax import nnx

from fwpkm_jax.layers.norms import GatedRMSNorm, RMSNorm
from fwpkm_jax.layers.parameters import declare_linear


class TitansGate(nnx.Module):
    """A projection of attention's output times SiLU of the memory's output, both normed."""

    def __init__(self, model_dim: int, *, norm_eps=1e-5, init_std=0.02, dtype=None, rngs):
        self.norm = GatedRMSNorm(model_dim, eps=norm_eps, dtype=dtype)
        self.memory_norm = RMSNorm(model_dim, eps=norm_eps)
        init = nnx.initializers.normal(init_std)
        self.out_proj = nnx.Linear(
            *(model_dim, model_dim),
            use_bias=False,
            dtype=dtype,
            kernel_init=init,
            rngs=rngs,
            **declare_linear("heads", "embed"),
        )

    def __call__(self, attended: jax.Array, remembered: jax.Array) -> jax.Array:
        return self.out_proj(self.norm(attended, self.memory_norm(remembered)))
