"""Root-mean-square norms."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.numerics import rms_normalize
from fwpkm_jax.core.platform import platform
from fwpkm_jax.layers.parameters import parameter


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

    @property
    def scale(self) -> Float[Array, " dim"]:
        """What multiplies the normalised input."""
        return 1 + self.weight[...] if self.offset else self.weight[...]

    def __call__(self, x: Float[Array, "*dims dim"]) -> Float[Array, "*dims dim"]:
        scale = jnp.expand_dims(self.scale, range(x.ndim - 1))
        return (rms_normalize(x, eps=self.eps) * scale).astype(self.dtype or x.dtype)

    def after_sum(
        self, x: Float[Array, "*dims dim"], branch: Float[Array, "*dims dim"] | None
    ) -> tuple[Float[Array, "*dims dim"], Float[Array, "*dims dim"]]:
        """`x + branch` and its norm, in one pass where a kernel takes them; None adds nothing.

        For the arrays of one device, and a norm in the dtype of `x`.
        """
        assert self.dtype is None, "the kernel's results have one dtype"
        from pallas_kernels.add_rms_norm import add_rms_norm  # Only a block adds here.

        return add_rms_norm(x, branch, self.scale, eps=self.eps)


def normed_maps(
    x: Float[Array, "*dims dim"],
    maps: Sequence[tuple[RMSNorm, nnx.Linear]],
    *,
    dtype: DTypeLike | None = None,
) -> list[Array]:
    """Linear maps of `x`, each under a norm of its own: `linear(norm(x).astype(dtype))`.

    An NVIDIA GPU multiplies the kernels by the norms' factors, not the normalised inputs. All maps
    are then one product with one normalised array, and send back one cotangent; the gradients of
    the factors are sums over kernels. The results are equal up to the rounding of `dtype`. Maps
    that are more than a kernel and a bias, as with low-rank updates, are computed as written.

    Args:
      x: what is normed.
      maps: norms of one epsilon, and linear maps of one dtype with a bias.
      dtype: of the normed inputs; None: that of `x`.
    """
    dtype = x.dtype if dtype is None else dtype
    if can_fold(maps):
        return _folded(rms_normalize(x, eps=maps[0][0].eps).astype(dtype), maps)
    return [linear(norm(x).astype(dtype)) for norm, linear in maps]


def normed_mix_map(
    x: Float[Array, "batch length dim"],
    y: Float[Array, "batch length dim"],
    gate: Float[Array, "batch length"],
    maps: Sequence[tuple[RMSNorm, nnx.Linear]],
    *,
    dtype: DTypeLike,
    sequences: int,
    chunk_size: int,
) -> Array:
    """`normed_maps` of `gate * x + (1 - gate) * y`, which a Hopper GPU never stores.

    For the arrays of one device, where `can_fold` the one map.

    Args:
      x, y, gate: what is mixed.
      maps: the norm of the mix, and the linear map of the norm in `dtype`.
      sequences: which, with `chunk_size`, say in what order the rows of `x` come, see
        `pallas_kernels.mix_rms_norm`.
      chunk_size: see there.
    """
    from pallas_kernels.mix_rms_norm import mix_rms_norm

    how: Any = {"sequences": sequences, "chunk_size": chunk_size}
    return _folded(mix_rms_norm(x, y, gate, eps=maps[0][0].eps, dtype=dtype, **how), maps)[0]


def can_fold(maps: Sequence[tuple[RMSNorm, nnx.Linear]]) -> bool:
    """Whether the norms' factors can go into the kernels, and the device gains by it."""
    return platform() == "gpu" and all(type(linear) is nnx.Linear for _, linear in maps)


def _folded(
    normalized: Float[Array, "*dims dim"], maps: Sequence[tuple[RMSNorm, nnx.Linear]]
) -> list[Array]:
    """The maps of an array that is normalised, but for the norms' factors."""
    assert len({norm.eps for norm, _ in maps}) == 1, "the maps share one normalised array"
    linears: list[Any] = [linear for _, linear in maps]
    first = linears[0]
    # A factor per feature before a map is a factor per row of its kernel.
    kernels = [norm.scale[:, None] * linear.kernel[...] for norm, linear in maps]
    arrays: Any = first.promote_dtype(
        (
            normalized,
            jnp.concatenate(kernels, axis=1),
            jnp.concatenate([linear.bias[...] for linear in linears]),
        ),
        dtype=first.dtype,
    )
    normalized, kernel, bias = arrays
    # One product for all maps, which are cut apart afterwards.
    y = jnp.matmul(normalized, kernel, precision=first.precision)
    y = y + jnp.expand_dims(bias, range(y.ndim - 1))
    ends = list(itertools.accumulate(kernel.shape[1] for kernel in kernels))
    return jnp.split(y, ends[:-1], axis=-1)


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
