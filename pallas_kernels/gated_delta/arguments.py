"""Arguments of the kernels, and the arrays that they keep for the backward pass."""

from typing import NamedTuple

import jax

CHUNK = 64
"""Tokens per chunk of every kernel. Larger chunks need more work for the triangular matrices and
less for the memory."""
WIDTH_STEP = 64
"""Head widths are padded to multiples of this."""
WIDEST_KEY = 128
WIDEST_VALUE = 256


class Inputs(NamedTuple):
    """Arguments of the kernels; their cotangents have the same shapes and dtypes."""

    query: jax.Array
    """`[batch, length, heads, key]`, float32 or bfloat16; length a multiple of the chunk."""
    key: jax.Array
    """`[batch, length, heads, key]`, of the query's dtype."""
    value: jax.Array
    """`[batch, length, heads, value]`, of the query's dtype."""
    log_decay: jax.Array
    """`[batch, length, heads]` float32."""
    beta: jax.Array
    """`[batch, length, heads]` float32."""
    state: jax.Array
    """`[batch, heads, key, value]` float32, the memory before the first token."""


class Residuals(NamedTuple):
    """Arrays that the backward pass reads besides the inputs.

    They are float32; bfloat16 on a GPU if the tokens are. On a TPU the heads of a group lie side by
    side: `tpu_blocks.Blocks.tiles_shape`.
    """

    states: jax.Array
    """`[batch, chunks, heads, key, value]`: the memory at each chunk's start."""
    inverses: jax.Array
    """`[batch, chunks, heads, chunk, chunk]`: the inverse of each chunk's triangular matrix."""


class Saved(NamedTuple):
    """What the backward pass reads."""

    inputs: Inputs
    residuals: Residuals


class Vectors(NamedTuple):
    """Numbers per token for the GPU's stages, `[batch, chunks, heads, chunk]` float32."""

    span_sums: jax.Array
    """Sums of log decays inside the chunk, `[batch, chunks, heads, levels, chunk]`: see
    `gpu_chunk.span_sums`."""
    beta: jax.Array
    to_token: jax.Array
    """Decay from the chunk's start up to and including the token."""
    to_end: jax.Array
    """Decay from after the token to the chunk's end."""
