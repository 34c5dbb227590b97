"""The dtype that sums, norms and softmaxes are computed in."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def compute_dtype(*dtypes: DTypeLike) -> jnp.dtype:
    """float64 if any of the dtypes is, else float32: never less, whatever the activations are.

    Unlike `jnp.promote_types`, this also works where implicit promotion is forbidden.
    """
    wide = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)
