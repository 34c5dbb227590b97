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
    LEVELS,
    chunk_tokens,
    column_blocks,
    decays_between,
    launch,
    program_place,
)
from pallas_kernels.gated_delta.gpu_tiles import (
    COLUMN,
    ROW,
    Halves,
    columns_of,
    columns_times,
    fetch_operand,
    fetched,
    gpu_halves,
    joined,
    load,
    multiply,
    operand,
    put,
    received,
    rows_times,
    send,
    smem,
    smem_halves,
    split,
    start_copies,
    start_sending,
    store,
    sum_of_products,
)
from pallas_kernels.gated_delta.gpu_triangle import (
    BLOCK,
    BLOCKS,
    SIDE,
    on_diagonal,
    triangle_inverse,
    triangle_scratch,
)


class Prepared(NamedTuple):
    """Arrays of every chunk that the walk and the backward pass read."""

    inverse: jax.Array
    """`[batch, chunks, heads, chunk, chunk]`, in the keys' dtype."""
    own: jax.Array
    """U, `[batch, chunks, heads, chunk, value]`, in the keys' dtype."""
    recall: Halves
    """`-Y`, `[batch, chunks, heads, chunk, key]` bfloat16."""


def prepare(key: jax.Array, value: jax.Array, log_decay: jax.Array, vectors: Vectors) -> Prepared:
    """The inverse of every chunk's triangular matrix, and the arrays that the walk reads.

    Args:
      key: `[batch, length, heads, key]`, float32 or bfloat16; length a multiple of the chunk.
      value: `[batch, length, heads, value]`, of the same dtype.
      log_decay: `[batch, chunks, heads, chunk]` float32.
      vectors: decays and write strengths per token.
    """
    place, width = vectors.beta.shape[:3], key.shape[-1]
    half = gpu_halves((*place, CHUNK, width), of=key.dtype)
    tile = smem_halves(CHUNK, WIDTH_STEP, of=key.dtype, swizzle=2 * SIDE)
    inverse, own, *recall = launch(
        _prepare_kernel,
        key,
        value,
        log_decay.reshape(*place, BLOCKS, BLOCK),
        *vectors[:-1],  # It needs no decay to the chunk's end.
        out_type=[
            jax.ShapeDtypeStruct((*place, CHUNK, CHUNK), key.dtype),
            jax.ShapeDtypeStruct((*place, CHUNK, value.shape[-1]), key.dtype),
            *half.refs,
        ],
        scratch=[
            [tile for _ in column_blocks(key)],
            tile,
            tile,
            # Bfloat16 arrives where products read it.
            () if key.dtype == jnp.bfloat16 else smem(CHUNK, WIDTH_STEP, key.dtype),
            triangle_scratch(),
            plgpu.Barrier(),
        ],
        grid=place,
        name="gated_delta_prepare",
    )
    return Prepared(inverse, own, Halves(*recall))


def _prepare_kernel(key, value, log_decay, span_sums, beta, to_token, *refs):
    inverse_out, own, *recall, keys, values, sent, stage, work, arrived = refs
    place = program_place()
    tokens = chunk_tokens(place)
    blocks = column_blocks(key)
    for columns, tile in zip(blocks, keys, strict=True):
        fetch_operand(key.at[(*tokens, columns)], tile, stage=stage, arrived=arrived)
    rounded = values.lo is None
    if rounded:
        stage = values.hi

    def start_values(columns):
        (copy,) = start_copies([(value.at[(*tokens, columns)], stage)], [arrived])
        return copy

    first, *others = column_blocks(value)
    of_values = start_values(first)

    # beta * (K K^T) * between: the matrix whose unit triangle is inverted, by blocks of columns.
    overlap = sum_of_products(*((tile, tile.transposed) for tile in keys))
    lower = [
        rows_times(load(beta.at[place], COLUMN), columns_of(overlap, i * BLOCK, (i + 1) * BLOCK))
        for i in range(BLOCKS)
    ]

    def decayed(level, *numbers):
        """Blocks of columns times the decays to tokens in the other half of the level's blocks."""
        sums = span_sums.at[(*place, level)]
        to_row = jnp.exp(load(sums, COLUMN))
        for i in numbers:
            from_column = jnp.exp(load(sums.at[pl.ds(i * BLOCK, BLOCK)], ROW))
            yield split(rows_times(to_row, columns_times(from_column, lower[i])))

    below = [*decayed(LEVELS - 2, 0, 2)], [*decayed(LEVELS - 1, 0, 1)]
    inverse = triangle_inverse(on_diagonal(lower), *below, log_decay.at[place], work)
    sides = column_blocks(values.hi, SIDE)

    for side, part in zip(sides, inverse, strict=True):
        if rounded:
            sent.hi.at[:, side][...] = part.astype(jnp.bfloat16)
        else:  # The registers hold more digits than the two halves.
            inverse_out.at[(*place, slice(None), side)][...] = part
    if rounded:
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sent.hi, inverse_out.at[place])

    factors = [operand(part, rounded=rounded) for part in inverse]

    def inverse_times(x, tile):
        """The inverse times registers, through the tile that held them."""
        put(tile, x, reused=True)
        return sum_of_products(
            *((a, tile.at(side)) for a, side in zip(factors, sides, strict=True))
        )

    def send(x, target):
        plgpu.wait_smem_to_gmem(0)  # The tile is free again.
        start_sending(sent, x, target)

    beta, to_token = (load(x.at[place], COLUMN) for x in (beta, to_token))
    for columns, tile in zip(blocks, keys, strict=True):
        # The walk adds -Y times the memory, so the sign is part of the factor.
        product = inverse_times(rows_times(-beta * to_token, joined(tile)), tile)
        send(product, Halves(*recall).at(*place, slice(None), columns))
    for columns in (first, *others):
        if columns is not first:
            of_values = start_values(columns)
        # U = inverse (beta * V).
        found = inverse_times(rows_times(beta, received(of_values)), values)
        target = own.at[(*place, slice(None), columns)]
        if rounded:
            send(found, Halves(target))
        else:
            target[...] = found
    plgpu.wait_smem_to_gmem(0)


class BeforeWalk(NamedTuple):
    """Arrays of every chunk that the transposed walk reads."""

    d_errors: jax.Array
    """`P^T dO`, `[batch, chunks, heads, chunk, value]`, in the keys' dtype."""
    step: jax.Array
    """`(gamma Q)^T dO`, `[batch, chunks, heads, key, value]`, in the keys' dtype."""
    recall: Halves
    """`-Y`, `[batch, chunks, heads, chunk, key]` bfloat16."""


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
    d_errors, step, *recall = launch(
        functools.partial(_before_kernel, scale=scale),
        query,
        key,
        *vectors[:-1],  # It needs no decay to the chunk's end.
        inverse,
        d_output,
        out_type=[
            jax.ShapeDtypeStruct((*place, CHUNK, value), key.dtype),
            jax.ShapeDtypeStruct((*place, width, value), key.dtype),
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
    return BeforeWalk(d_errors, step, Halves(*recall))


def _before_kernel(query, key, span_sums, beta, to_token, inverse, d_output, *refs, scale):
    d_errors, step, *recall, queries, keys, inverse_tile, attention, work, stage, arrived = refs
    place = program_place()
    tokens = chunk_tokens(place)
    beta, to_token = (load(x.at[place], COLUMN) for x in (beta, to_token))
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
        put(work, rows_times(-beta * to_token, block), reused=True)
        target = Halves(*recall).at(*place, slice(None), columns)
        send(work, multiply(inverse_tile, work), target, reused=True)
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
