"""GPU: prepares all chunks for the walks in parallel, one program for each chunk of each head.

Before the walk (`prepare`) a program computes the products of keys with keys, the decays, the
inverse of the triangular matrix and the two products with the inverse. Of the `[chunk, chunk]`
arrays only the inverse is written to GPU memory, because the backward pass reads it. Before the
transposed walk (`before_walk`) it computes what the chunk's output alone sends back; values are
processed 64 columns at a time. The letters are those of docs/explanation/math.md.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
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
from pallas_kernels.gated_delta.gpu_triangle import SIDE, triangle_inverse


class Prepared(NamedTuple):
    """Arrays of every chunk that the walk and the backward pass read."""

    inverse: jax.Array
    """`[batch, chunks, heads, chunk, chunk]`, in the keys' dtype."""
    own: jax.Array
    """U, `[batch, chunks, heads, chunk, value]`, in the keys' dtype."""
    left: Halves
    """`-Y`, `[batch, chunks, heads, chunk, key]` bfloat16."""
    right: Halves
    """Keys times the decay to the chunk's end, like `left`."""


def prepare(key: jax.Array, value: jax.Array, vectors: Vectors) -> Prepared:
    """The inverse of every chunk's triangular matrix, and the arrays that the walk reads.

    Args:
      key: `[batch, length, heads, key]`, float32 or bfloat16; length a multiple of the chunk.
      value: `[batch, length, heads, value]`, of the same dtype.
      vectors: decays and write strengths per token.
    """
    place, width = vectors.beta.shape[:3], key.shape[-1]
    half = gpu_halves((*place, CHUNK, width), of=key.dtype)
    inverse, own, *halves = launch(
        _prepare_kernel,
        key,
        value,
        *vectors,
        out_type=[
            jax.ShapeDtypeStruct((*place, CHUNK, CHUNK), key.dtype),
            jax.ShapeDtypeStruct((*place, CHUNK, value.shape[-1]), key.dtype),
            *half.refs,
            *half.refs,
        ],
        scratch=[
            smem_halves(CHUNK, width, of=key.dtype, slots=1),
            *(smem_halves(CHUNK, CHUNK, swizzle=2 * SIDE, slots=1) for _ in range(2)),
            smem(CHUNK, WIDTH_STEP, key.dtype),
            plgpu.SMEM((1,), jnp.int32),
            plgpu.Barrier(),
        ],
        grid=place,
        name="gated_delta_prepare",
    )
    return Prepared(inverse, own, *two_halves(halves))


def _prepare_kernel(key, value, span_sums, beta, to_token, to_end, *refs):
    inverse_out, own, *outputs, keys, a, b, stage, zero, arrived = refs
    outputs = two_halves(outputs)
    zero[0] = jnp.int32(0)
    plgpu.commit_smem()  # All threads read it.
    place = program_place()
    tokens = chunk_tokens(place)
    fetch = functools.partial(fetched, stage=stage, arrived=arrived)
    slots = keys, a, b

    def vector(of_tokens):
        return load(of_tokens.at[place], COLUMN)

    def recomputed():
        keys, a, b = (tile.at(zero[0]) for tile in slots)
        return keys, a, b

    def operands():
        """The work tiles as operands of the keys' dtype."""
        return [Halves(*tile.refs[: len(keys.refs)]) for tile in recomputed()[1:]]

    blocks = column_blocks(key)
    keys, a, b = recomputed()
    for columns in blocks:
        put(keys.at(slice(None), columns), fetch(key.at[(*tokens, columns)]))
    between = decays_between(span_sums.at[place])
    # beta * (K K^T) * between: the matrix whose unit triangle is inverted.
    lower = rows_times(vector(beta), multiply(keys, keys.transposed) * between)
    # The keys are fetched again below: their tile, and with bfloat16 the stage, hold the triangle.
    held = Halves(keys.hi, stage if keys.lo is None else keys.lo)
    held = put(held.at(slice(None), pl.ds(0, CHUNK)), lower, reused=True)
    inverse = triangle_inverse(held, slots[1:], zero)
    a, b = operands()
    for columns, half in zip(column_blocks(a.hi, SIDE), inverse, strict=True):
        put(a.at(slice(None), columns), half)
        # In float32 the registers hold more digits than the two halves.
        if a.lo is not None:
            inverse_out.at[(*place, slice(None), columns)][...] = half
    if a.lo is None:
        plgpu.copy_smem_to_gmem(a.hi, inverse_out.at[place])
    for columns in blocks:
        a, b = operands()
        block = fetch(key.at[(*tokens, columns)])
        part = (*place, slice(None), columns)
        left, right = (x.at(*part) for x in outputs)
        # Each vector is loaded where it is used: kept, it would take registers in every loop.
        send_factors(a, b, block, vector(beta) * vector(to_token), vector(to_end), left, right)
    for columns in column_blocks(value):
        a, b = operands()
        put(b, rows_times(vector(beta), fetch(value.at[(*tokens, columns)])))
        # U = inverse (beta * V).
        store(multiply(a, b), own.at[(*place, slice(None), columns)], stage=stage)


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
    # P, without the scale of queries, which they have already.
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
        # P^T dO.
        d_error = multiply(attention.transposed, work)
        store(d_error, d_errors.at[(*place, slice(None), columns)], stage=stage)
        for rows in blocks:
            block = queries.at(slice(None), rows)
            # (gamma Q)^T dO, 64 x 64 entries at a time.
            added = multiply(block.transposed, work)
            store(added, step.at[(*place, rows, columns)], stage=stage)
