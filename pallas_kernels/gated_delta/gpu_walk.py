"""GPU: the walk from chunk to chunk, the only sequential part of the forward and backward pass.

    w = add + left s          s <- whole s + step + right^T w

With `add = U, left = -Y, right = to_end * K` and without `step` this is the memory's recurrence.
From the last chunk to the first, with left and right exchanged, it is the recurrence of the
memory's cotangent. So one Mosaic GPU kernel computes both. It reads the keys themselves: their
decays multiply what a product with them takes or gives.

The memory stays in registers, in float32, from the first chunk to the last; the products and the
dtypes of what is read and written are those of `gpu_tiles`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.arguments import CHUNK
from pallas_kernels.gated_delta.gpu_chunk import chunk_tokens, launch
from pallas_kernels.gated_delta.gpu_tiles import (
    COLUMN,
    Halves,
    load,
    multiply,
    put,
    rows_times,
    smem,
    smem_halves,
)
from pallas_kernels.mosaic_gpu import index32

VALUE_BLOCK = 32
"""Columns of the memory per thread block. Columns are independent of each other. With 32 of them
the paper's 64 memories give 128 blocks for the 132 multiprocessors of an H100."""
SWIZZLE = 2 * VALUE_BLOCK
"""Bytes in a row of the narrowest operand; both operands of a product need the same swizzle."""
SLOTS = 2
"""Chunks in shared memory: one is in use, one is being loaded."""


def walk(
    add: jax.Array,
    recall: Halves,
    keys: Halves,
    to_end: jax.Array,
    whole: jax.Array,
    start: jax.Array,
    step: jax.Array | None,
    *,
    reverse: bool,
) -> tuple[jax.Array, jax.Array]:
    """The state before each chunk and after the last one.

    Args:
      add: `[batch, chunks, heads, chunk, value]`, float32 or bfloat16.
      recall: `-Y`, `[batch, chunks, heads, chunk, key]`, in halves, or rounded if `add` is
        bfloat16.
      keys: `[batch, length, heads, key]`, like `recall`.
      to_end: `[batch, chunks, heads, chunk]` float32, decays from after each token.
      whole: `[batch, chunks, heads]` float32.
      start: `[batch, heads, key, value]` float32, the state before the first chunk walked.
      step: `[batch, chunks, heads, key, value]` of `add`'s dtype, or None.
      reverse: True walks from the last chunk to the first.

    Returns:
      States `[batch, chunks, heads, key, value]` of `add`'s dtype, and the last state `[batch,
      heads, key, value]` float32.
    """
    batch, chunks, heads, _, key = recall.hi.shape
    value = add.shape[-1]
    steps = () if step is None else (step,)
    operands = (*recall.refs, *keys.refs)
    arriving = {"slots": SLOTS, "swizzle": SWIZZLE}
    scratch = [
        smem(CHUNK, VALUE_BLOCK, add.dtype, **arriving),
        smem_halves(CHUNK, key, of=add.dtype, **arriving),
        smem_halves(CHUNK, key, of=add.dtype, **arriving),
        plgpu.SMEM((SLOTS, CHUNK), jnp.float32),
        tuple(smem(key, VALUE_BLOCK, add.dtype, **arriving) for _ in steps),
        smem_halves(key, VALUE_BLOCK, of=add.dtype, swizzle=SWIZZLE),
        smem_halves(CHUNK, VALUE_BLOCK, of=add.dtype, swizzle=SWIZZLE),
        plgpu.Barrier(num_arrivals=2 + len(operands) + len(steps), num_barriers=SLOTS),
    ]
    states, last = launch(
        functools.partial(_walk_kernel, chunks=chunks, reverse=reverse),
        whole,
        start,
        to_end,
        add,
        *operands,
        *steps,
        out_type=[
            jax.ShapeDtypeStruct((batch, chunks, heads, key, value), add.dtype),
            jax.ShapeDtypeStruct(start.shape, jnp.float32),
        ],
        scratch=scratch,
        grid=(batch, heads, value // VALUE_BLOCK),
        axes=("batch", "heads", "columns"),
        name="gated_delta_walk_back" if reverse else "gated_delta_walk",
    )
    return states, last


def _walk_kernel(whole, start, to_end, add, *refs, chunks, reverse):
    *refs, decays, step_tile, state_tile, errors_tile, arrived = refs
    *arriving, states, last, add_tile, recall_tile, keys_tile = refs
    halves = len(recall_tile.refs)
    recall, keys, step = arriving[:halves], arriving[halves : 2 * halves], arriving[2 * halves :]
    batch, head, block = (jax.lax.axis_index(name) for name in ("batch", "heads", "columns"))
    columns = pl.ds(block * VALUE_BLOCK, VALUE_BLOCK)

    def chunk_of(i):
        return chunks - 1 - i if reverse else i

    def fetch(i):
        place = (batch, chunk_of(i), head)
        slot = jax.lax.rem(i, np.int32(SLOTS))
        for source, tile in (
            (add.at[(*place, slice(None), columns)], add_tile),
            (to_end.at[place], decays),
            *((x.at[place], tile) for x, tile in zip(recall, recall_tile.refs, strict=True)),
            *(
                (x.at[chunk_tokens(place)], tile)
                for x, tile in zip(keys, keys_tile.refs, strict=True)
            ),
            *(
                (x.at[(*place, slice(None), columns)], tile)
                for x, tile in zip(step, step_tile, strict=True)
            ),
        ):
            plgpu.copy_gmem_to_smem(source, tile.at[slot], arrived.at[slot])

    for i in range(min(SLOTS, chunks)):
        fetch(jnp.int32(i))

    def advance(i, state):
        i = index32(i)
        slot = jax.lax.rem(i, np.int32(SLOTS))
        here = states.at[batch, chunk_of(i), head, :, columns]
        # The registers keep float32; products read the memory in halves.
        put(state_tile, state)
        if state_tile.lo is None:
            plgpu.copy_smem_to_gmem(state_tile.hi, here)
        else:
            here[...] = state
        plgpu.barrier_wait(arrived.at[slot])
        errors = load(add_tile.at[slot]).astype(jnp.float32)
        decay = load(decays.at[slot], COLUMN)
        left, right = recall_tile.at(slot), keys_tile.at(slot)
        if reverse:
            left, right = right, left
        product = multiply(left, state_tile)
        # W = U - Y H: the errors that the chunk writes.
        errors += rows_times(decay, product) if reverse else product
        put(errors_tile, errors if reverse else rows_times(decay, errors))
        state = whole[batch, chunk_of(i), head] * state
        for tile in step_tile:
            state += load(tile.at[slot]).astype(jnp.float32)
        # H' = whole * H + K^T (to_end * W).
        state += multiply(right.transposed, errors_tile)
        plgpu.wait_smem_to_gmem(0)  # The state's tile is free again.
        plgpu.commit_smem()  # All warps have read this slot.

        @pl.when(i + SLOTS < chunks)
        def _():
            fetch(i + SLOTS)

        return state

    state = load(start.at[batch, head, :, columns])
    state = jax.lax.fori_loop(0, chunks, advance, state)
    last.at[batch, head, :, columns][...] = state
