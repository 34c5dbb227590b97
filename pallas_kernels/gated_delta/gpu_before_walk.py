"""GPU: the backward pass before the transposed walk, one program for each chunk of each head.

The letters are those of docs/explanation/math.md. Values are processed 64 columns at a time.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import gpu_interpreter
from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP, Vectors
from pallas_kernels.gated_delta.gpu_chunk import (
    GRID_NAMES,
    chunk_tokens,
    column_blocks,
    decays_between,
    program_place,
    send_factors,
)
from pallas_kernels.gated_delta.gpu_tiles import (
    COLUMN,
    ROW,
    Halves,
    compiler_params,
    fetched,
    joined,
    load,
    multiply,
    put,
    rows_times,
    smem,
    smem_halves,
)


class BeforeWalk(NamedTuple):
    """Arrays of every chunk that the transposed walk reads."""

    d_errors: jax.Array
    """`P^T dO`, `[batch, chunks, heads, chunk, value]` float32."""
    step: jax.Array
    """`(gamma Q)^T dO`, `[batch, chunks, heads, key, value]` float32."""
    left: Halves
    """`-Y`, `[batch, chunks, heads, chunk, key]` bfloat16."""
    right: Halves
    """Keys times the decay to the chunk's end, like `left`."""


def before_walk(
    query: jax.Array,
    key: jax.Array,
    vectors: Vectors,
    inverse: jax.Array,
    d_output: jax.Array,
    *,
    scale: float,
) -> BeforeWalk:
    """Cotangents of a chunk's errors and of the memory at its start, from the chunk's output only.

    Args:
      query: `[batch, length, heads, key]`.
      key: `[batch, length, heads, key]`.
      vectors: decays and write strengths per token.
      inverse: `[batch, chunks, heads, chunk, chunk]`.
      d_output: `[batch, length, heads, value]` float32.
      scale: factor on the queries.
    """
    place, width, value = vectors.beta.shape[:3], key.shape[-1], d_output.shape[-1]
    half = jax.ShapeDtypeStruct((*place, CHUNK, width), jnp.bfloat16)
    d_errors, step, *halves = plgpu.kernel(
        functools.partial(_before_kernel, scale=scale),
        out_type=[
            jax.ShapeDtypeStruct((*place, CHUNK, value), jnp.float32),
            jax.ShapeDtypeStruct((*place, width, value), jnp.float32),
            *(half for _ in range(4)),
        ],
        scratch_types=[
            smem_halves(CHUNK, width),
            smem_halves(CHUNK, width, of=key.dtype),
            *(smem_halves(CHUNK, CHUNK) for _ in range(3)),
            smem(CHUNK, WIDTH_STEP, key.dtype),
            smem(CHUNK, WIDTH_STEP, jnp.float32),
            plgpu.Barrier(),
        ],
        grid=place,
        grid_names=GRID_NAMES,
        kernel_name="gated_delta_before_walk",
        compiler_params=compiler_params(),
        interpret=gpu_interpreter(),
    )(query, key, *vectors, inverse, d_output)
    return BeforeWalk(d_errors, step, Halves(*halves[:2]), Halves(*halves[2:]))


def _before_kernel(query, key, log_decay, beta, to_token, to_end, inverse, d_output, *refs, scale):
    d_errors, step, left_hi, left_lo, right_hi, right_lo, *scratch = refs
    queries, keys, inverse_tile, attention, work, stage, wide_stage, arrived = scratch
    place = program_place()
    tokens = chunk_tokens(place)
    beta, to_token, to_end = (load(x.at[place], COLUMN) for x in (beta, to_token, to_end))
    fetch = functools.partial(fetched, stage=stage, arrived=arrived)
    fetch_wide = functools.partial(fetched, stage=wide_stage, arrived=arrived)

    blocks = column_blocks(key)
    for columns in blocks:
        put(queries.at(slice(None), columns), scale * fetch(query.at[(*tokens, columns)]))
        put(keys.at(slice(None), columns), fetch(key.at[(*tokens, columns)]))
    between = decays_between(load(log_decay.at[place], ROW), attention, work)
    put(attention, multiply(queries, keys.transposed) * between)
    put(inverse_tile, fetch_wide(inverse.at[place]))
    for columns in blocks:
        block = joined(keys.at(slice(None), columns))
        part = (*place, slice(None), columns)
        left, right = Halves(left_hi, left_lo).at(*part), Halves(right_hi, right_lo).at(*part)
        send_factors(inverse_tile, work, block, beta * to_token, to_end, left, right)
        block = scale * fetch(query.at[(*tokens, columns)])
        put(queries.at(slice(None), columns), rows_times(to_token, block))

    for columns in column_blocks(d_output):
        put(work, fetch_wide(d_output.at[(*tokens, columns)]))
        d_errors.at[(*place, slice(None), columns)][...] = multiply(attention.transposed, work)
        for rows in blocks:
            block = queries.at(slice(None), rows)
            step.at[(*place, rows, columns)][...] = multiply(block.transposed, work)
