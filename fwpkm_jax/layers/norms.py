"""Root-mean-square norms."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.normalize import rms_normalize
from fwpkm_jax.layers.parameters import parameter
from pallas_kernels.add_rms_norm import add_rms_norm


class RMSNorm(nnx.Module):
    """The input at unit root mean square, times `1 + weight`; the weight starts at zero.

    Without `offset` the factor is `weight`, which starts at one.

    Computed in at least float32 and cast once at the end.

    References: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        offset: bool = True,
        dtype: DTypeLike | None = None,
    ):
        """Args: `dim` the normalised width; `dtype` of the result, None for the input's."""
        self.eps = eps
        self.offset = offset
        self.dtype = dtype
        self.weight = parameter(
            (jnp.zeros if offset else jnp.ones)((dim,), jnp.float32), "norm_scale", (None,)
        )

    def __call__(self, x: Float[Array, "*dims dim"]) -> Float[Array, "*dims dim"]:
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        scale = 1 + weight if self.offset else weight
        return (rms_normalize(x, eps=self.eps) * scale).astype(self.dtype or x.dtype)

    def after_sum(
        self, x: Float[Array, "*dims dim"], branch: Float[Array, "*dims dim"] | None
    ) -> tuple[Float[Array, "*dims dim"], Float[Array, "*dims dim"]]:
        """`x + branch` and its norm, in one pass where a kernel takes them; None adds nothing.

        For the arrays of one device, and a norm in the dtype of `x`.
        """
        assert self.dtype is None, "the kernel's results have one dtype"
        scale = 1 + self.weight[...] if self.offset else self.weight[...]
        return add_rms_norm(x, branch, scale, eps=self.eps)


class GatedRMSNorm(nnx.Module):
    """The input at unit root mean square, times `weight * SiLU(gate)`; the weight starts at one.

    The weight multiplies directly, unlike `RMSNorm`'s: the published layer has both kinds.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5, dtype: DTypeLike | None = None):
        """Args: `dim` the normalised width; `dtype` of the result, None for the gate's."""
        self.eps = eps
        self.dtype = dtype
        self.weight = parameter(jnp.ones((dim,), jnp.float32), "norm_scale", (None,))

    def __call__(
        self, x: Float[Array, "*dims dim"], gate: Float[Array, "*dims dim"]
    ) -> Float[Array, "*dims dim"]:
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        normalized = rms_normalize(x, eps=self.eps) * weight
        return (normalized * jax.nn.silu(gate.astype(normalized.dtype))).astype(
            self.dtype or gate.dtype
        )
