"""The precision in which fast weights wait between calls."""

from __future__ import annotations

from typing import Literal

import jax

from fwpkm_jax.models.language_model import Memory

FastWeightDtype = Literal["float32", "bfloat16"]


def as_stored(memory: Memory, dtype: FastWeightDtype) -> Memory:
    """What a call finds that reads back a memory kept in `dtype`; arrays keep their own dtype.

    The authors' release keeps fast weights in bfloat16 between calls and computes in float32, so a
    write is rounded once per call.
    """
    if dtype == "float32":
        return memory
    # Not a cast there and back, which XLA is free to leave out.
    return jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7), memory)
