"""The definition of the norm of a gated mix, in plain JAX."""

import jax
from jax.typing import DTypeLike

from fwpkm_jax.core.numerics import rms_normalize


def mix_rms_norm(
    x: jax.Array, y: jax.Array, gate: jax.Array, *, eps: float, dtype: DTypeLike
) -> jax.Array:
    """See `pallas_kernels.mix_rms_norm`."""
    gate = gate[..., None]
    return rms_normalize(gate * x + (1.0 - gate) * y, eps=eps).astype(dtype)
