"""The precision of fast weights between calls."""

from typing import Literal

import jax
import jax.numpy as jnp

from fwpkm_jax.models.language_model import Memory

FastWeightDtype = Literal["float32", "bfloat16"]


def as_stored(memory: Memory, dtype: FastWeightDtype) -> Memory:
    """The memory rounded to the precision of `dtype`; arrays keep their own dtype.

    The authors' release keeps fast weights in bfloat16 between calls and computes in float32, so a
    write is rounded once per call.
    """
    if dtype == "float32":
        return memory
    # XLA may remove a pair of casts; it keeps reduce_precision.
    return jax.tree.map(
        lambda x: jax.lax.reduce_precision(x, 8, 7) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        memory,
    )
