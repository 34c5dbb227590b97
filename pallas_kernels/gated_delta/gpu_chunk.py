"""GPU: functions that all stages use for one chunk and head: index, blocks, decays, factors."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP
from pallas_kernels.gated_delta.gpu_tiles import (
    COLUMN,
    ROW,
    load,
)
from pallas_kernels.mosaic_gpu import NO_BARRIERS, launch_grid

GRID_NAMES = ("batch", "chunks", "heads")
LEVELS = CHUNK.bit_length() - 1
"""Bits of a token's number in its chunk."""


def launch(
    *kernel_and_operands: Any, grid: Sequence[int], axes: Sequence[str] = GRID_NAMES, **how: Any
) -> Any:
    """`launch_grid` of kernels with their own barriers, by default for each chunk of each head."""
    places = dict(zip(axes, grid, strict=True))
    return launch_grid(*kernel_and_operands, grid=places, compiler=NO_BARRIERS, **how)


def program_place() -> tuple:
    """The batch, chunk and head that a program works on."""
    return tuple(jax.lax.axis_index(name) for name in GRID_NAMES)


def chunk_tokens(place: tuple) -> tuple:
    """The index of a program's tokens in `[batch, length, heads, width]`."""
    batch, chunk, head = place
    return batch, pl.ds(chunk * CHUNK, CHUNK), head


def column_blocks(x: Any, step: int = WIDTH_STEP) -> list:
    """Slices of the last axis, `step` columns each."""
    return [pl.ds(start, step) for start in range(0, x.shape[-1], step)]


def positions() -> tuple[jax.Array, jax.Array]:
    """Row and column number of every entry of a square tile."""
    return tuple(  # pyright: ignore[reportReturnType]
        plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )


def span_sums(log_decay: jax.Array) -> jax.Array:
    """Sums of log decays, of which two make the sum over any span of a chunk without a difference.

    Two tokens `s < r` whose numbers first differ in bit `level` are in the left and the right half
    of a block of `2 * 2**level` tokens. The sum over `s < t <= r` is that from after s to the end
    of its half, plus that from the start of the other half up to r. A difference of two running
    sums would lose its digits after one strong decay.

    Args:
      log_decay: `[..., chunk]` float32.

    Returns:
      `[..., levels, chunk]`: each token's sum inside its half of that level.
    """
    token = np.arange(CHUNK)
    masks = []
    for level in range(LEVELS):
        half = token >> level
        right = (half % 2 == 1)[None, :]
        included = np.where(right, token[:, None] <= token, token[:, None] > token)
        masks.append(included & (half[:, None] == half))
    mask = np.stack(masks).astype(np.float32)
    return jnp.einsum("...t,lts->...ls", log_decay, mask, precision=jax.lax.Precision.HIGHEST)


def decays_between(span_sums: Any) -> jax.Array:
    """`Decays.between` of a chunk, in registers.

    Args:
      span_sums: the chunk's sums `[levels, chunk]` in GPU memory.
    """
    row, column = positions()
    apart, square = row ^ column, (CHUNK, CHUNK)
    spans = jnp.zeros(square, jnp.float32)
    # The highest bit in which two tokens differ comes last, so its level stays.
    for level in range(LEVELS):
        sums = span_sums.at[level]
        to_half = jax.lax.broadcast_in_dim(load(sums, ROW), square, (1,))
        from_half = jax.lax.broadcast_in_dim(load(sums, COLUMN), square, (0,))
        spans = jnp.where(apart >= 2**level, from_half + to_half, spans)
    return jnp.where(column <= row, jnp.exp(spans), 0.0)
