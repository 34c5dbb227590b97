"""GPU: what the parts of a program of `gpu_after_walk` share: refs, tiles and their addresses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.arguments import CHUNK
from pallas_kernels.gated_delta.gpu_tiles import COLUMN, Halves, load, smem, smem_halves
from pallas_kernels.mosaic_gpu import index32

BLOCK = 32
"""Columns of values, keys and queries processed at a time. Both operands of a product need the same
swizzle, so the square tiles have that of 32 columns too."""


class GlobalRefs(NamedTuple):
    """Refs to GPU memory: arguments, results, and W and dH, which the part for keys reads again."""

    query: Any
    key: Any
    value: Any
    span_sums: Any
    beta: Any
    to_token: Any
    to_end: Any
    states: Any
    inverses: Any
    d_output: Any
    d_after: Any
    d_query: Any
    d_key: Any
    d_value: Any
    d_beta: Any
    d_log_spans: Any
    d_log_to_token: Any
    d_log_to_end: Any
    errors: Halves
    d_recalled: Halves


class Program(NamedTuple):
    """What all parts of a program use."""

    gmem: GlobalRefs
    scale: float
    keys: Halves
    """`[1, chunk, key]`, in shared memory like the two squares that follow."""
    inverse: Halves
    attention: Halves
    between: Halves
    """`Decays.between`, `[1, chunk, chunk]` float32, in one part."""
    zero: Any
    arrived: list
    place: tuple
    tokens: tuple

    def recomputed(self, *tiles: Halves) -> tuple[Halves, ...]:
        """The only slot of each tile, by an index that the compiler cannot know to be zero.

        With known addresses it computes the descriptor of every operand once, in two registers, and
        keeps it from the first product to the last; other registers are then spilled.
        """
        slot = self.zero[0]
        return tuple(tile.at(slot) for tile in tiles)

    def column(self, vector: Any) -> jax.Array:
        """One of the vectors, read where it is used: from part to part it would take registers."""
        return load(vector.at[self.place], COLUMN)


def send_block(stage: Any, x: jax.Array, target: Any) -> None:
    """Starts to copy registers to GPU memory through shared memory, in its dtype."""
    stage[...] = x.astype(stage.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, target)


def halves(rows: int, columns: int, **options: Any) -> Halves:
    """Scratch for the operand of a product, `[1, rows, columns]`; options of `smem_halves`."""
    return smem_halves(rows, columns, slots=1, swizzle=2 * BLOCK, **options)


def stages(dtype: Any, *, slots: int) -> Any:
    """Scratch that tiles of 64 rows pass through, `[slots, 64, 32]`."""
    swizzle = BLOCK * jnp.dtype(dtype).itemsize
    return smem(CHUNK, BLOCK, dtype, slots=slots, swizzle=swizzle)


def block_at(i: Any) -> Any:
    """The columns of block `i`, which a loop may count."""
    return pl.ds(index32(i) * BLOCK, BLOCK)


def zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((CHUNK, columns), jnp.float32), plgpu.Layout.WGMMA)


def row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1)
