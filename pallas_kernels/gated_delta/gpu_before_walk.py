"""GPU: the backward pass before the transposed walk, one program for each chunk of each head.

The letters are those of docs/explanation/math.md. Values are processed 64 columns at a time.
"""

import functools
from typing import NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP, Vectors
from pallas_kernels.gated_delta.gpu_chunk import (
    chunk_tokens,
    column_blocks,
    decays_between,
    launch,
    program_place,
    send_factors,
)
from pallas_kernels.gated_delta.gpu_tiles import (
    COLUMN,
    Halves,
    fetched,
    gpu_halves,
    joined,
    load,
    multiply,
    put,
    rows_times,
    smem,
    smem_halves,
    store,
    two_halves,
)


class BeforeWalk(NamedTuple):
    """Arrays of every chunk that the transposed walk reads."""

    d_errors: jax.Array
    """`P^T dO`, `[batch, chunks, heads, chunk, value]`, in the keys' dtype."""
    step: jax.Array
    """`(gamma Q)^T dO`, `[batch, chunks, heads, key, value]`, in the keys' dtype."""
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
      d_output: `[batch, length, heads, value]`, in the keys' dtype.
      scale: factor on the queries.
    """
    place, width, value = vectors.beta.shape[:3], key.shape[-1], d_output.shape[-1]
    half = gpu_halves((*place, CHUNK, width), of=key.dtype)
    d_errors, step, *halves = launch(
        functools.partial(_before_kernel, scale=scale),
        query,
        key,
        *vectors,
        inverse,
        d_output,
        out_type=[
            jax.ShapeDtypeStruct((*place, CHUNK, value), key.dtype),
            jax.ShapeDtypeStruct((*place, width, value), key.dtype),
            *half.refs,
            *half.refs,
        ],
        scratch=[
            *(smem_halves(CHUNK, width, of=key.dtype) for _ in range(2)),
            *(smem_halves(CHUNK, CHUNK, of=key.dtype) for _ in range(3)),
            smem(CHUNK, WIDTH_STEP, key.dtype),
            plgpu.Barrier(),
        ],
        grid=place,
        name="gated_delta_before_walk",
    )
    return BeforeWalk(d_errors, step, *two_halves(halves))


def _before_kernel(query, key, span_sums, beta, to_token, to_end, inverse, d_output, *refs, scale):
    d_errors, step, *outputs, queries, keys, inverse_tile, attention, work, stage, arrived = refs
    outputs = two_halves(outputs)
    place = program_place()
    tokens = chunk_tokens(place)
    beta, to_token, to_end = (load(x.at[place], COLUMN) for x in (beta, to_token, to_end))
    fetch = functools.partial(fetched, stage=stage, arrived=arrived)

    blocks = column_blocks(key)
    for columns in blocks:
        put(queries.at(slice(None), columns), scale * fetch(query.at[(*tokens, columns)]))
        put(keys.at(slice(None), columns), fetch(key.at[(*tokens, columns)]))
    between = decays_between(span_sums.at[place])
    put(attention, multiply(queries, keys.transposed) * between, reused=True)
    put(inverse_tile, fetch(inverse.at[place]))
    for columns in blocks:
        block = joined(keys.at(slice(None), columns))
        part = (*place, slice(None), columns)
        left, right = (x.at(*part) for x in outputs)
        send_factors(inverse_tile, work, block, beta * to_token, to_end, left, right)
        block = scale * fetch(query.at[(*tokens, columns)])
        put(queries.at(slice(None), columns), rows_times(to_token, block))

    for columns in column_blocks(d_output):
        put(work, fetch(d_output.at[(*tokens, columns)]))
        d_error = multiply(attention.transposed, work)
        store(d_error, d_errors.at[(*place, slice(None), columns)], stage=stage)
        for rows in blocks:
            block = queries.at(slice(None), rows)
            added = multiply(block.transposed, work)
            store(added, step.at[(*place, rows, columns)], stage=stage)
