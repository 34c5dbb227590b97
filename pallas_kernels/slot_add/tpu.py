"""TensorCore kernel: goes through the sorted references, sums rows and copies the sums back.

References are sorted by slot. The token's row of each reference is copied in ahead of time and
added to the running sum of its slot. At the slot's last reference the sum is added to the table's
row, which has been copied in, and the row is copied back. One core does all the work, so a slot
that is read very often costs no more per reference than others.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fwpkm_jax.core.slots.values.grouping import SlotGroups
from pallas_kernels import dispatch
from pallas_kernels.slot_add.sorted_references import sorted_references

TILE = 4096
"""References per tile; their scalars must fit in scalar memory."""
AHEAD = 64
"""References whose rows are being copied in; as many rows may be on their way back. Twice as many
would need more semaphores than a core has. A power of 2 makes remainders cheap."""


def add(
    values: jax.Array,
    groups: SlotGroups,
    coefficients: jax.Array,
    rows: jax.Array,
    *,
    with_old_rows: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """`slot_add` in place; with `with_old_rows` also the changed rows before the addition."""
    places = coefficients.shape[1]
    references, width = groups.order.shape[0], rows.shape[1]
    tile = min(TILE, references)
    tiles = pl.cdiv(references, tile)
    outputs = pl.pallas_call(
        _Kernel(tile, places, with_old_rows),
        grid=(tiles,),
        in_specs=[
            *[pl.BlockSpec((1, 1, tile), lambda i: (i, 0, 0), memory_space=pltpu.SMEM)] * 3,
            *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
        ],
        out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * (1 + with_old_rows),
        out_shape=[
            jax.ShapeDtypeStruct(values.shape, values.dtype),
            *[jax.ShapeDtypeStruct((references, width), values.dtype)] * with_old_rows,
        ],
        scratch_shapes=[
            pltpu.VMEM((AHEAD, 1, width), jnp.float32),  # rows of tokens
            pltpu.VMEM((2 * AHEAD, 1, width), jnp.float32),  # rows of the table
            pltpu.VMEM((2 * AHEAD, 1, width), jnp.float32),  # their sums
            pltpu.VMEM((1, width), jnp.float32),  # the sum of a run cut by the tile
            pltpu.SMEM((1,), jnp.int32),  # runs that ended so far
            pltpu.SemaphoreType.DMA((AHEAD,)),
            pltpu.SemaphoreType.DMA((2 * AHEAD,)),
            pltpu.SemaphoreType.DMA((2 * AHEAD,)),
        ],
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=dispatch.interpreted(),
        name="slot_add",
    )(*_scalars(groups, coefficients, tile), rows, values)
    return outputs[0], outputs[1] if with_old_rows else None


def _scalars(
    groups: SlotGroups, coefficients: jax.Array, tile: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """By sorted position: reference, coefficient, and the slot if its run ends there, else -1."""
    in_order = sorted_references(groups, coefficients, multiple=tile)
    order, factors, ends = (x.reshape(-1, 1, tile) for x in in_order[:3])
    return order, factors, ends


class _Kernel:
    """The kernel's body for one tile."""

    def __init__(self, tile: int, places: int, with_old_rows: bool):
        self.tile, self.places, self.with_old_rows = tile, places, with_old_rows

    def __call__(self, order, coefficients, ends, rows, _, table, *refs):
        # The table is also an input (`_`), in the same memory.
        old_rows, refs = (refs[0], refs[1:]) if self.with_old_rows else (table, refs)
        rows_in, table_in, table_out, carried, ended, rows_sem, in_sem, out_sem = refs
        tile, places = self.tile, self.places
        live = min(tile, 2 * AHEAD)

        def slot(j):
            return ends[0, 0, j]

        def rows_copy(j):
            token = order[0, 0, j] // places
            return pltpu.make_async_copy(
                rows.at[pl.ds(token, 1)], rows_in.at[j % AHEAD], rows_sem.at[j % AHEAD]
            )

        def copy_in(j):
            buffer = j % (2 * AHEAD)
            source = table.at[pl.ds(slot(j), 1)]
            return pltpu.make_async_copy(source, table_in.at[buffer], in_sem.at[buffer])

        def copy_out(j):
            buffer = j % (2 * AHEAD)
            target = table.at[pl.ds(slot(j), 1)]
            return pltpu.make_async_copy(table_out.at[buffer], target, out_sem.at[buffer])

        def log(j, group):
            # Uses the semaphore of `copy_out`, which counts the bytes of both copies.
            buffer = j % (2 * AHEAD)
            target = old_rows.at[pl.ds(group, 1)]
            return pltpu.make_async_copy(table_in.at[buffer], target, out_sem.at[buffer])

        def start(j):
            rows_copy(j).start()

            @pl.when(slot(j) >= 0)
            def _():
                copy_in(j).start()

        def wait_out(j):
            @pl.when(slot(j) >= 0)
            def _():
                copy_out(j).wait()
                if self.with_old_rows:
                    log(j, 0).wait()

        @pl.when(pl.program_id(0) == 0)
        def _():
            carried[...] = jnp.zeros_like(carried)
            ended[0] = 0

        def step(j, total):
            rows_copy(j).wait()
            total = total + coefficients[0, 0, j] * rows_in[j % AHEAD]

            @pl.when(slot(j) >= 0)
            def _():
                buffer = j % (2 * AHEAD)
                copy_in(j).wait()
                table_out[buffer] = table_in[buffer] + total
                copy_out(j).start()
                if self.with_old_rows:
                    log(j, ended[0]).start()
                ended[0] += 1

            # The buffers of an earlier reference are free after they have been written out.
            @pl.when(j + AHEAD < tile)
            def _():
                pl.when(j >= AHEAD)(lambda: wait_out(j - AHEAD))
                start(j + AHEAD)

            return jnp.where(slot(j) >= 0, 0.0, total)

        pl.loop(0, min(AHEAD, tile))(start)
        carried[...] = jax.lax.fori_loop(0, tile, step, carried[...])
        # The loop has not waited for the last `live` rows yet.
        pl.loop(max(0, tile - live), tile)(wait_out)
