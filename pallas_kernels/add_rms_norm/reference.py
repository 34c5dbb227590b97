"""The definition of the residual sum with its norm, in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fwpkm_jax.core.numerics import rms_normalize


class AddRMSNorm(NamedTuple):
    """A residual stream and its norm, both in the stream's dtype."""

    total: jax.Array
    normed: jax.Array


def add_rms_norm(
    x: jax.Array, branch: jax.Array | None, scale: jax.Array, *, eps: float
) -> AddRMSNorm:
    """See `pallas_kernels.add_rms_norm`."""
    total = x if branch is None else x + branch
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return AddRMSNorm(total, (rms_normalize(total, eps=eps) * scale).astype(x.dtype))
