"""GPU: functions that all stages use for one chunk and head: index, blocks, decays, factors."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import gpu_interpreter
from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP
from pallas_kernels.gated_delta.gpu_tiles import Halves, multiply, put, rows_times, send

GRID_NAMES = ("batch", "chunks", "heads")


def launch(
    kernel: Callable[..., None],
    *operands: jax.Array,
    out_type: Any,
    scratch: Sequence[Any],
    grid: Sequence[int],
    axes: Sequence[str] = GRID_NAMES,
    name: str,
) -> Any:
    """Runs `kernel(*operands, *outputs, *scratch)` as one program, one warpgroup, per grid place.

    Args:
      kernel: takes refs to operands and outputs in GPU memory, then its scratch memory.
      operands: arrays that are read.
      out_type: types of the outputs.
      scratch: shared memory and barriers of each program.
      grid: how many programs there are along each axis.
      axes: the names of these axes.
      name: of the kernel in profiles.
    """
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid),
        grid_names=tuple(axes),
        kernel_name=name,
        # Layouts mean the same in all versions of JAX, and barriers are where the kernels have
        # them: JAX would add two to each store to shared memory, and one to each copy.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=gpu_interpreter(),
    )(*operands)


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


def decays_between(log_decay: jax.Array, *work: Halves) -> jax.Array:
    """`Decays.between` of a chunk, from its log decays in the row layout.

    The error of a sum of log decays is the decay's relative error, so one bfloat16 number is not
    enough. Each log decay is split in three, which hold all 24 bits of a float32, or, beside other
    operands that are rounded to bfloat16, in two; products with a mask are exact.

    Args:
      log_decay: `[chunk]` in the layout `ROW`.
      work: square tiles in shared memory that are overwritten. Four refs give three numbers each,
        three refs two.
    """
    *terms, mask = [ref for tile in work for ref in tile.refs][:4]
    row, column = positions()
    until = jax.lax.broadcast_in_dim(log_decay, (CHUNK, CHUNK), (1,))
    until = jnp.where(column <= row, until, 0.0)
    for term in terms:
        part = until.astype(jnp.bfloat16)
        term[...] = part
        until = until - part.astype(jnp.float32)
    mask[...] = jnp.where(row > column, 1.0, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def accumulate(total):
        for term in reversed(terms):
            plgpu.wgmma(total, term, mask)
        return total[...]

    spans = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK), jnp.float32))
    return jnp.where(column <= row, jnp.exp(spans), 0.0)


def send_factors(
    inverse: Halves,
    work: Halves,
    keys: jax.Array,
    to_start: jax.Array,
    to_end: jax.Array,
    left: Halves,
    right: Halves,
) -> None:
    """Writes the walk's factors `-Y` and the decayed keys, for a block of the keys' columns.

    Args:
      inverse: inverse of the chunk's triangular matrix, in shared memory.
      work: a tile in shared memory for intermediate results.
      keys: `[chunk, 64]` in registers.
      to_start: write strengths times decays from the chunk's start, a column.
      to_end: decays to the chunk's end, a column.
      left: GPU memory for `-Y`.
      right: GPU memory for the decayed keys.
    """
    put(work, rows_times(to_start, keys))
    send(work, -multiply(inverse, work), left, reused=True)
    send(work, rows_times(to_end, keys), right)
