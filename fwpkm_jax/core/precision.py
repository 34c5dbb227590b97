"""The dtype that sums, norms and softmaxes are computed in."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def compute_dtype(*dtypes: DTypeLike) -> jnp.dtype:
    """float64 if one of the dtypes is float64, else float32, also for bfloat16 activations.

    Unlike `jnp.promote_types`, this also works where implicit promotion is forbidden.
    """
    wide = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)
