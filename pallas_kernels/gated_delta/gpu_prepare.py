"""GPU: prepares all chunks for the walk in parallel, one program per chunk.

Each program computes the products of keys with keys, the decays, the inverse of the triangular
matrix and the two products with the inverse. Of the `[chunk, chunk]` arrays only the inverse is
written to GPU memory, because the backward pass reads it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP
from pallas_kernels.gated_delta.gpu_chunk import (
    chunk_tokens,
    column_blocks,
    decays_between,
    launch,
    positions,
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

SIDE = CHUNK // 2
"""Columns of a square tile that the inverse handles at a time."""


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


def prepare(
    key: jax.Array,
    value: jax.Array,
    span_sums: jax.Array,
    beta: jax.Array,
    to_token: jax.Array,
    to_end: jax.Array,
) -> Prepared:
    """The inverse of every chunk's triangular matrix, and the arrays that the walk reads.

    Args:
      key: `[batch, length, heads, key]`, float32 or bfloat16; length a multiple of the chunk.
      value: `[batch, length, heads, value]`, of the same dtype.
      span_sums: `[batch, chunks, heads, levels, chunk]` float32, of the log decays.
      beta: write strengths, `[batch, chunks, heads, chunk]` float32, like the vectors that follow.
      to_token: decay from the chunk's start to each token.
      to_end: decay from each token to the chunk's end.
    """
    place, width = beta.shape[:3], key.shape[-1]
    half = gpu_halves((*place, CHUNK, width), of=key.dtype)
    inverse, own, *halves = launch(
        _prepare_kernel,
        key,
        value,
        span_sums,
        beta,
        to_token,
        to_end,
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

    def anew():
        keys, a, b = (tile.at(zero[0]) for tile in slots)
        return keys, a, b

    def operands():
        """The work tiles as operands of the keys' dtype."""
        return [Halves(*tile.refs[: len(keys.refs)]) for tile in anew()[1:]]

    blocks = column_blocks(key)
    keys, a, b = anew()
    for columns in blocks:
        put(keys.at(slice(None), columns), fetch(key.at[(*tokens, columns)]))
    between = decays_between(span_sums.at[place])
    lower = rows_times(vector(beta), multiply(keys, keys.transposed) * between)
    # The keys are fetched again below: their tile, and with bfloat16 the stage, hold the triangle.
    held = Halves(keys.hi, stage if keys.lo is None else keys.lo)
    held = put(held.at(slice(None), pl.ds(0, CHUNK)), lower, reused=True)
    inverse = triangle_inverse(held, slots[1:], zero)
    a, b = operands()
    for columns, half in zip(column_blocks(a.hi, SIDE), inverse, strict=True):
        put(a.at(slice(None), columns), half)
        if a.lo is not None:
            inverse_out.at[(*place, slice(None), columns)][...] = half
    if a.lo is None:
        plgpu.copy_smem_to_gmem(a.hi, inverse_out.at[place])
    for columns in blocks:
        a, b = operands()
        block = fetch(key.at[(*tokens, columns)])
        part = (*place, slice(None), columns)
        left, right = (x.at(*part) for x in outputs)
        send_factors(a, b, block, vector(beta) * vector(to_token), vector(to_end), left, right)
    for columns in column_blocks(value):
        a, b = operands()
        put(b, rows_times(vector(beta), fetch(value.at[(*tokens, columns)])))
        store(multiply(a, b), own.at[(*place, slice(None), columns)], stage=stage)


def triangle_inverse(lower: Halves, slots: Any, zero: Any) -> list[jax.Array]:
    """`(I + tril(lower, -1))^-1` like `chunk.write_inverse`, in registers; overwrites `slots`.

    `lower` stays in shared memory, because its 32 registers a thread decide how many programs a
    processor holds. For the same reason the positions are computed anew for each mask: `zero` holds
    a 0 that the compiler does not know, so it cannot keep the positions of the mask before.

    Up to blocks of 32 all matrices are zero outside the two 32 x 32 squares of the diagonal, and
    the last product is zero outside one square. Products leave out the other squares.

    Returns:
      The left and the right 32 columns.
    """

    def joining(block):
        """True where row and column are in the same pair of blocks but in different blocks."""
        row, column = positions()
        row = row + zero[0]
        apart = row ^ column
        return (row > column) & (apart >= block) & (apart < 2 * block)

    def anew():
        return [tile.at(zero[0]) for tile in slots]

    def put_joining(b, block):
        for half, there in zip(lower, b, strict=True):
            there[...] = jnp.where(joining(block), load(half), jnp.zeros((), half.dtype))
        plgpu.commit_smem()

    a, b = anew()
    sides = column_blocks(a.hi, SIDE)
    row, column = positions()
    start = jnp.where(row == column, 1.0, 0.0) - jnp.where(joining(1), joined(lower), 0.0)
    put(a, start, reused=True)  # Blocks of 2.
    inverse = [joined(a.at(slice(None), side)) for side in sides]
    for block in (2**power for power in range(1, SIDE.bit_length() - 1)):
        a, b = anew()
        put_joining(b, block)
        for side in sides:
            half = b.at(slice(None), side)
            put(half, multiply(half, a.at(side, side)), reused=True)
        a, b = anew()
        for i, side in enumerate(sides):
            inverse[i] = inverse[i] - multiply(a.at(slice(None), side), b.at(side, side))
            put(a.at(slice(None), side), inverse[i], reused=True)
    left, right = sides
    a, b = anew()
    put_joining(b, SIDE)
    half = b.at(slice(None), left)
    put(half, multiply(half, a.at(left, left)), reused=True)
    inverse[0] = inverse[0] - multiply(a.at(slice(None), right), b.at(right, left))
    return inverse
