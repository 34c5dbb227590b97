"""GPU: the inverse of a chunk's triangular matrix, by blocks of 16 tokens.

The four blocks on the diagonal are inverted by substitution, a column of a block for each thread.
Two levels of products then join them to blocks of 32 and to the chunk. Work tiles `[chunk, 16]` and
`[chunk, 32]` hold a block of rows of each block, so that no tile has a part to mask.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import interpreted
from pallas_kernels.gated_delta.arguments import CHUNK
from pallas_kernels.gated_delta.gpu_tiles import (
    LAYOUT,
    Halves,
    columns_of,
    joined,
    load,
    put,
    smem_halves,
    split,
    sum_of_products,
)

BLOCK = 16
"""Tokens of a diagonal block that is inverted by substitution."""
BLOCKS = CHUNK // BLOCK
SIDE = 2 * BLOCK
"""Columns of the parts that the inverse is returned in."""
_BY_COLUMN: Any = plgpu.Layout.TILED(
    plgpu.Tiling(((BLOCKS, 1, BLOCK), (1,))),
    warp_dims=(-4,),
    lane_dims=(plgpu.Replicated(2), -2),
    vector_dim=-1,
)
"""Layout of `[blocks, rows, columns]`: a block for each warp, a column for each lane (twice)."""
_BY_BLOCK = _BY_COLUMN.reduce(2)
"""Layout of `[blocks, rows]`: every lane of a block's warp has all rows."""


class Scratch(NamedTuple):
    """Shared memory of `triangle_inverse`."""

    lower: Any
    solved: Any
    inverse: Halves
    product: Halves


def triangle_scratch() -> Scratch:
    """The types of `Scratch`."""
    square = plgpu.SMEM((BLOCKS, BLOCK, BLOCK), jnp.float32)
    tile = smem_halves(CHUNK, SIDE, swizzle=2 * BLOCK)
    return Scratch(square, square, tile, tile)


def on_diagonal(columns: Sequence[jax.Array]) -> jax.Array:
    """The diagonal blocks of a matrix, one below the other, from its blocks of columns.

    Args:
      columns: four times `[chunk, 16]`.

    Returns:
      `[chunk, 16]`.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK, BLOCK), 0, layout=LAYOUT)
    found = columns[-1]
    for i, block in reversed([*enumerate(columns[:-1])]):
        found = jnp.where(row < (i + 1) * BLOCK, block, found)
    return found


def triangle_inverse(
    diagonal: jax.Array,
    in_pairs: Sequence[Halves],
    in_chunk: Sequence[Halves],
    log_decay: Any,
    work: Scratch,
) -> list[jax.Array]:
    """`(I + tril(lower, -1))^-1` like `chunk.write_inverse`, in registers.

    Args:
      diagonal: `[chunk, 16]`, the diagonal blocks of `lower`, one below the other, without decays.
      in_pairs: halves of the first and third 16 columns of `lower`, in registers; of each the
        block below the diagonal's is read.
      in_chunk: of the first and second 16 columns; the lower half is read.
      log_decay: ref to the log decays of the tokens, `[blocks, 16]` in GPU memory.
      work: shared memory.

    Returns:
      The left and the right 32 columns.
    """
    _store_rows(diagonal, work.lower)
    plgpu.commit_smem()
    _substitute(work.lower, log_decay, work.solved)
    plgpu.commit_smem()
    blocks = _load_rows(work.solved)
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK, BLOCK), 0, layout=LAYOUT)
    odd, upper = (row & BLOCK) != 0, row < SIDE
    of = [pl.ds(i * BLOCK, BLOCK) for i in range(BLOCKS)]

    # [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]], first for both pairs of blocks.
    inverse, product = (x.at(slice(None), of[0]) for x in (work.inverse, work.product))
    put(inverse, blocks)
    products = [
        sum_of_products((x, inverse.at(rows))) for x, rows in zip(in_pairs, of[::2], strict=True)
    ]
    put(product, jnp.where(upper, *products))
    negative = split(-blocks)
    corners = [sum_of_products((negative, product.at(rows))) for rows in of[1::2]]
    put(inverse, jnp.where(odd, jnp.where(upper, *corners), blocks))
    put(work.inverse.at(slice(None), of[1]), jnp.where(odd, blocks, 0.0))
    # Then for the chunk.
    upper_rows = (work.inverse.at(rows) for rows in of[:2])
    put(work.product, sum_of_products(*zip(in_chunk, upper_rows, strict=True)))
    pairs = joined(work.inverse)
    corner = sum_of_products((split(-pairs), work.product.at(pl.ds(SIDE, SIDE))))
    upper = plgpu.broadcasted_iota(jnp.int32, pairs.shape, 0, layout=LAYOUT) < SIDE
    return [jnp.where(upper, pairs, corner), jnp.where(upper, 0.0, pairs)]


def _store_rows(x: jax.Array, blocks: Any) -> None:
    """Stores `[chunk, 16]` in shared memory `[blocks, 16, 16]`."""
    if interpreted():  # The interpreter cannot reshape a ref.
        blocks[...] = x.reshape(blocks.shape)
    else:
        blocks.reshape(x.shape)[...] = x


def _load_rows(blocks: Any) -> jax.Array:
    """Loads shared memory `[blocks, 16, 16]` as `[chunk, 16]`."""
    if interpreted():
        return blocks[...].reshape(CHUNK, BLOCK)
    return load(blocks.reshape(CHUNK, BLOCK))


def _substitute(lower: Any, log_decay: Any, solved: Any) -> None:
    """Inverts the diagonal blocks, whose entries still lack the decays between their tokens."""
    shape = (BLOCKS, 1, BLOCK)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 2, layout=_BY_COLUMN)
    decays = jnp.exp(load(log_decay, _BY_BLOCK))
    rows: list[jax.Array] = []

    def wide(x, i):
        """Column `i` of `[blocks, rows]`, for all columns of the blocks."""
        x = jax.lax.broadcast_in_dim(columns_of(x, i, i + 1), shape, (0, 1))
        return plgpu.layout_cast(x, _BY_COLUMN)

    for i in range(BLOCK):
        row = jnp.where(column == i, 1.0, 0.0)
        if i:
            # Earlier rows decay token by token, so that no factor can overflow.
            rows = [wide(decays, i) * x for x in rows]
            factors = load(lower.at[:, i, pl.ds(0, i)], _BY_BLOCK)
            for j, x in enumerate(rows):
                row = row - wide(factors, j) * x
        solved.at[:, pl.ds(i, 1), :][...] = row
        rows.append(row)
