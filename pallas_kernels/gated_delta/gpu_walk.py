"""GPU: the walk from chunk to chunk, the only sequential part, forward and backward alike.

    w = add + left s          s <- whole s + step + right^T w

is the memory's recurrence with `add = U, left = -Y, right = to_end * K` and no step, and its
cotangent's, from the last chunk to the first, with left and right exchanged: transposing a walk
gives a walk. One Mosaic GPU kernel therefore does both.

wgmma multiplies no float32 and takes transposed operands of 16 bits only, so each float32 operand
is the sum of two bfloat16 halves, `hi + lo`, and a product is `hi hi + hi lo + lo hi` in a float32
accumulator: what is left out is 2^-17 of the product. The memory itself stays float32, in
registers, from the first chunk to the last.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import gpu_interpreter
from pallas_kernels.gated_delta.arguments import CHUNK

VALUE_BLOCK = 32
"""Columns of the memory per thread block: columns do not depend on each other, and with 32 the
paper's 64 memories make 128 blocks, for an H100's 132 processors."""
SWIZZLE = 2 * VALUE_BLOCK
"""Bytes of the narrowest operand's row: both operands of a product have one swizzle."""
SLOTS = 2
"""Chunks in shared memory: one in use, one arriving."""


class Halves(NamedTuple):
    """A float32 array as the sum of two bfloat16 arrays."""

    hi: Any
    lo: Any

    @classmethod
    def of(cls, x: jax.Array) -> "Halves":
        # A plain cast to bfloat16 and back is what XLA may drop, and the low half with it.
        hi = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return cls(hi.astype(jnp.bfloat16), (x - hi).astype(jnp.bfloat16))


def walk(
    add: jax.Array,
    left: jax.Array,
    right: jax.Array,
    whole: jax.Array,
    start: jax.Array,
    step: jax.Array | None,
    *,
    reverse: bool,
) -> tuple[jax.Array, jax.Array]:
    """The state before each chunk, and after the last; all arrays float32.

    Args:
      add: `[batch, chunks, heads, chunk, value]`.
      left: `[batch, chunks, heads, chunk, key]`.
      right: `[batch, chunks, heads, chunk, key]`.
      whole: `[batch, chunks, heads]`.
      start: `[batch, heads, key, value]`, the state before the first chunk walked.
      step: `[batch, chunks, heads, key, value]` or None.
      reverse: from the last chunk to the first.

    Returns:
      States `[batch, chunks, heads, key, value]` and the last state `[batch, heads, key, value]`.
    """
    batch, chunks, heads, _, key = left.shape
    value = add.shape[-1]
    steps = () if step is None else (step,)
    rows = functools.partial(_operand, CHUNK, key)
    scratch = [
        _operand(CHUNK, VALUE_BLOCK, jnp.float32, slots=SLOTS),
        Halves(*(rows(jnp.bfloat16, slots=SLOTS) for _ in range(2))),
        Halves(*(rows(jnp.bfloat16, slots=SLOTS) for _ in range(2))),
        tuple(_operand(key, VALUE_BLOCK, jnp.float32, slots=SLOTS) for _ in steps),
        Halves(*(_operand(key, VALUE_BLOCK, jnp.bfloat16) for _ in range(2))),
        Halves(*(_operand(CHUNK, VALUE_BLOCK, jnp.bfloat16) for _ in range(2))),
        plgpu.Barrier(num_arrivals=5 + len(steps), num_barriers=SLOTS),
    ]
    states, last = plgpu.kernel(
        functools.partial(_walk_kernel, chunks=chunks, has_step=bool(steps), reverse=reverse),
        out_type=[
            jax.ShapeDtypeStruct((batch, chunks, heads, key, value), jnp.float32),
            jax.ShapeDtypeStruct(start.shape, jnp.float32),
        ],
        scratch_types=scratch,
        grid=(batch, heads, value // VALUE_BLOCK),
        grid_names=("batch", "heads", "columns"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=gpu_interpreter(),
    )(add, *Halves.of(left), *Halves.of(right), whole, start, *steps)
    return states, last


def _walk_kernel(
    add, left_hi, left_lo, right_hi, right_lo, whole, start, *refs, chunks, has_step, reverse
):
    step, refs = (refs[:1], refs[1:]) if has_step else ((), refs)
    states, last, *scratch = refs
    add_tile, left_tile, right_tile, step_tile, state_tile, errors_tile, arrived = scratch
    batch, head, block = (jax.lax.axis_index(name) for name in ("batch", "heads", "columns"))
    columns = pl.ds(block * VALUE_BLOCK, VALUE_BLOCK)

    def chunk_of(i):
        return chunks - 1 - i if reverse else i

    def fetch(i):
        place = (batch, chunk_of(i), head)
        slot = jax.lax.rem(i, SLOTS)
        for source, tile in (
            (add.at[(*place, slice(None), columns)], add_tile),
            (left_hi.at[place], left_tile.hi),
            (left_lo.at[place], left_tile.lo),
            (right_hi.at[place], right_tile.hi),
            (right_lo.at[place], right_tile.lo),
            *(
                (x.at[(*place, slice(None), columns)], tile)
                for x, tile in zip(step, step_tile, strict=True)
            ),
        ):
            plgpu.copy_gmem_to_smem(source, tile.at[slot], arrived.at[slot])

    for i in range(min(SLOTS, chunks)):
        fetch(jnp.int32(i))

    def advance(i, state):
        slot = jax.lax.rem(i, SLOTS)
        states.at[batch, chunk_of(i), head, :, columns][...] = state
        _put(state_tile, state)
        plgpu.barrier_wait(arrived.at[slot])
        errors = _multiply_add(
            _load(add_tile.at[slot]),
            Halves(left_tile.hi.at[slot], left_tile.lo.at[slot]),
            state_tile,
        )
        _put(errors_tile, errors)
        carried = whole[batch, chunk_of(i), head] * state
        for tile in step_tile:
            carried += _load(tile.at[slot])
        transposed = (tile.at[slot].transpose((1, 0)) for tile in right_tile)
        state = _multiply_add(carried, Halves(*transposed), errors_tile)
        plgpu.commit_smem()  # All warps have read this slot.

        @pl.when(i + SLOTS < chunks)
        def _():
            fetch(i + SLOTS)

        return state

    state = _load(start.at[batch, head, :, columns])
    state = jax.lax.fori_loop(0, chunks, advance, state)
    last.at[batch, head, :, columns][...] = state


def _multiply_add(start: jax.Array, a: Halves, b: Halves) -> jax.Array:
    """`start + a b`, up to the product of the two low halves."""

    def accumulate(total):
        plgpu.wgmma(total, a.lo, b.hi)
        plgpu.wgmma(total, a.hi, b.lo)
        plgpu.wgmma(total, a.hi, b.hi)
        return total[...]

    shape = (a.hi.shape[0], b.hi.shape[1])
    return start + pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))


def _put(tile: Halves, x: jax.Array) -> None:
    """Splits registers into shared memory, ready to be multiplied."""
    hi = x.astype(jnp.bfloat16)
    tile.hi[...] = hi
    tile.lo[...] = (x - hi.astype(jnp.float32)).astype(jnp.bfloat16)
    plgpu.commit_smem()


def _load(ref: Any) -> jax.Array:
    """Reads a float32 tile in the layout of wgmma's accumulators."""
    layout = plgpu.Layout.WGMMA
    if jax.__version_info__ < (0, 11):  # TODO: drop once jax>=0.11.
        return plgpu.load(ref, (), layout=layout, optimized=False)  # pyright: ignore
    return plgpu.load(ref, layout=layout, optimized=False)


def _operand(rows: int, columns: int, dtype: Any, *, slots: int | None = None) -> Any:
    """Shared memory for a tile, tiled and swizzled as wgmma and TMA want it."""
    transforms = (
        plgpu.TilingTransform((8, SWIZZLE // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(SWIZZLE),
    )
    shape = (rows, columns) if slots is None else (slots, rows, columns)
    return plgpu.SMEM(shape, dtype, transforms=transforms)
