"""GPU: the inverse of a chunk's triangular matrix, in the registers of one warpgroup."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.arguments import CHUNK
from pallas_kernels.gated_delta.gpu_chunk import column_blocks, positions
from pallas_kernels.gated_delta.gpu_tiles import Halves, joined, load, multiply, put

SIDE = CHUNK // 2
"""Columns of a square tile that the inverse handles at a time."""


def triangle_inverse(lower: Halves, slots: Any, zero: Any) -> list[jax.Array]:
    """`(I + tril(lower, -1))^-1` like `chunk.write_inverse`, in registers; overwrites `slots`.

    `lower` stays in shared memory, because its 32 registers a thread decide how many programs a
    processor holds. For the same reason the positions are recomputed for each mask: `zero` holds
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

    def recomputed():
        return [tile.at(zero[0]) for tile in slots]

    def put_joining(b, block):
        for half, there in zip(lower, b, strict=True):
            there[...] = jnp.where(joining(block), load(half), jnp.zeros((), half.dtype))
        plgpu.commit_smem()

    a, b = recomputed()
    sides = column_blocks(a.hi, SIDE)
    row, column = positions()
    start = jnp.where(row == column, 1.0, 0.0) - jnp.where(joining(1), joined(lower), 0.0)
    put(a, start, reused=True)  # Blocks of 2.
    inverse = [joined(a.at(slice(None), side)) for side in sides]
    # Blocks double: [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
    for block in (2**power for power in range(1, SIDE.bit_length() - 1)):
        a, b = recomputed()
        # C of every pair of blocks at once; the rest of the tile is zero.
        put_joining(b, block)
        for side in sides:
            half = b.at(slice(None), side)
            put(half, multiply(half, a.at(side, side)), reused=True)
        a, b = recomputed()
        for i, side in enumerate(sides):
            # -B^-1 (C A^-1) stands where C was, and zeros are added elsewhere.
            inverse[i] = inverse[i] - multiply(a.at(slice(None), side), b.at(side, side))
            put(a.at(slice(None), side), inverse[i], reused=True)
    left, right = sides
    a, b = recomputed()
    put_joining(b, SIDE)
    half = b.at(slice(None), left)
    put(half, multiply(half, a.at(left, left)), reused=True)
    inverse[0] = inverse[0] - multiply(a.at(slice(None), right), b.at(right, left))
    return inverse
