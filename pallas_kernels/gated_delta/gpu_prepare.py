"""GPU: prepares all chunks for the walk in parallel, one program per chunk.

Each program computes the products of keys with keys, the decays, the inverse of the triangular
matrix and the two products with the inverse. Of the `[chunk, chunk]` arrays only the inverse is
written to GPU memory, because the backward pass reads it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import gpu_interpreter
from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP
from pallas_kernels.gated_delta.gpu_chunk import (
    GRID_NAMES,
    chunk_tokens,
    column_blocks,
    decays_between,
    positions,
    program_place,
    send_factors,
)
from pallas_kernels.gated_delta.gpu_tiles import (
    COLUMN,
    ROW,
    Halves,
    compiler_params,
    fetched,
    load,
    multiply,
    put,
    rows_times,
    smem,
    smem_halves,
)


class Prepared(NamedTuple):
    """Arrays of every chunk that the walk and the backward pass read."""

    inverse: jax.Array
    """`[batch, chunks, heads, chunk, chunk]` float32."""
    own: jax.Array
    """U, `[batch, chunks, heads, chunk, value]` float32."""
    left: Halves
    """`-Y`, `[batch, chunks, heads, chunk, key]` bfloat16."""
    right: Halves
    """Keys times the decay to the chunk's end, like `left`."""


def prepare(
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    to_token: jax.Array,
    to_end: jax.Array,
) -> Prepared:
    """The inverse of every chunk's triangular matrix, and the arrays that the walk reads.

    Args:
      key: `[batch, length, heads, key]`, float32 or bfloat16; length a multiple of the chunk.
      value: `[batch, length, heads, value]`, of the same dtype.
      log_decay: `[batch, chunks, heads, chunk]` float32, like the vectors that follow.
      beta: write strengths.
      to_token: decay from the chunk's start to each token.
      to_end: decay from each token to the chunk's end.
    """
    place, width = beta.shape[:3], key.shape[-1]
    half = jax.ShapeDtypeStruct((*place, CHUNK, width), jnp.bfloat16)
    inverse, own, *halves = plgpu.kernel(
        _prepare_kernel,
        out_type=[
            jax.ShapeDtypeStruct((*place, CHUNK, CHUNK), jnp.float32),
            jax.ShapeDtypeStruct((*place, CHUNK, value.shape[-1]), jnp.float32),
            *(half for _ in range(4)),
        ],
        scratch_types=[
            smem_halves(CHUNK, width, of=key.dtype),
            smem_halves(CHUNK, CHUNK),
            smem_halves(CHUNK, CHUNK),
            smem(CHUNK, WIDTH_STEP, key.dtype),
            plgpu.Barrier(),
        ],
        grid=place,
        grid_names=GRID_NAMES,
        kernel_name="gated_delta_prepare",
        compiler_params=compiler_params(),
        interpret=gpu_interpreter(),
    )(key, value, log_decay, beta, to_token, to_end)
    return Prepared(inverse, own, Halves(*halves[:2]), Halves(*halves[2:]))


def _prepare_kernel(key, value, log_decay, beta, to_token, to_end, *refs):
    inverse_out, own, left_hi, left_lo, right_hi, right_lo, *scratch = refs
    keys, a, b, stage, arrived = scratch
    place = program_place()
    tokens = chunk_tokens(place)
    beta, to_token, to_end = (load(x.at[place], COLUMN) for x in (beta, to_token, to_end))
    fetch = functools.partial(fetched, stage=stage, arrived=arrived)

    blocks = column_blocks(key)
    for columns in blocks:
        put(keys.at(slice(None), columns), fetch(key.at[(*tokens, columns)]))
    overlap = multiply(keys, keys.transposed)
    between = decays_between(load(log_decay.at[place], ROW), a, b)
    inverse = triangle_inverse(rows_times(beta, overlap * between), a, b)
    inverse_out.at[place][...] = inverse

    put(a, inverse)
    for columns in blocks:
        block = fetch(key.at[(*tokens, columns)])
        part = (*place, slice(None), columns)
        left, right = Halves(left_hi, left_lo).at(*part), Halves(right_hi, right_lo).at(*part)
        send_factors(a, b, block, beta * to_token, to_end, left, right)
    for columns in column_blocks(value):
        put(b, rows_times(beta, fetch(value.at[(*tokens, columns)])))
        own.at[(*place, slice(None), columns)][...] = multiply(a, b)


def triangle_inverse(lower: jax.Array, a: Halves, b: Halves) -> jax.Array:
    """`(I + tril(lower, -1))^-1` in registers, like `chunk.write_inverse`; overwrites `a`, `b`."""
    row, column = positions()
    lower = jnp.where(row > column, lower, 0.0)
    inverse = jnp.where(row == column, 1.0, 0.0)
    # `joining`: row and column are in the same pair of blocks but in different blocks.
    apart = row ^ column
    for block in (2**power for power in range((CHUNK - 1).bit_length())):
        joining = jnp.where((apart >= block) & (apart < 2 * block), lower, 0.0)
        if block == 1:
            inverse = inverse - joining  # So far `inverse` is the identity.
            continue
        put(a, inverse)
        put(b, joining)
        put(b, multiply(b, a))
        inverse = inverse - multiply(a, b)
    return inverse
