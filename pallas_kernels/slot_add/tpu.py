"""TensorCore kernel: goes through blocks of distinct slots, sums rows and copies the sums back.

References are sorted by slot. One core takes one block of distinct slots after the other and sums
the references of each slot in a register. Meanwhile the table's rows of the next block are copied
in, and the changed rows of earlier blocks are copied back. A semaphore counts the bytes of all
copies of a block, so no copy is waited for by itself. A slot that is read very often costs no more
per reference than others.

The scalar unit, which computes the addresses of single rows, bounds the kernel. For this reason
loops over rows are unrolled: the addresses of eight rows in a tile differ by constants.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fwpkm_jax.core.slots.values.grouping import SlotGroups
from pallas_kernels import dispatch
from pallas_kernels.slot_add.sorted_references import sorted_references

BLOCK = 128
"""Distinct slots whose rows are copied together; a power of 2, at least 8."""
CHUNK = 512
"""References whose scalars are copied to scalar memory together; a power of 2, at least 8."""
RESIDENT = 2**24
"""Largest size in bytes of the tokens' rows that are in VMEM during the call. Larger arrays stay in
HBM, and the row of each reference is copied by itself."""
SUBLANES = 8
"""Rows of a tile in VMEM."""


class _Scratch(NamedTuple):
    """Buffers and semaphores. Most hold several blocks or chunks, which take turns."""

    slots: Any
    """Of the block whose rows are copied back, and of the next two."""
    steps: Any
    """Of this chunk of references and of the next two."""
    coefficients: Any
    rows: Any
    """A token's row for each reference of this chunk and of the next; None if all are in VMEM."""
    table_in: Any
    """Rows of the table: those of this block, the next block's, and the last one's, which are being
    logged."""
    sums: Any
    """Sums of this block's runs."""
    changed: Any
    """Changed rows of this block and of the last one."""
    slots_sem: Any
    scalars_sem: Any
    rows_sem: Any
    in_sem: Any
    out_sem: Any
    log_sem: Any


def add(
    values: jax.Array,
    groups: SlotGroups,
    coefficients: jax.Array,
    rows: jax.Array,
    *,
    with_old_rows: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """`slot_add` in place; with `with_old_rows` also the changed rows before the addition."""
    references, width = groups.order.shape[0], rows.shape[1]
    in_order = sorted_references(
        groups, coefficients, num_slots=values.shape[0], chunk=CHUNK, block=BLOCK
    )
    blocks = in_order.slots.shape[0]
    # Rows of tokens that fit VMEM are there from the start, and need no copies.
    resident = rows.size * rows.dtype.itemsize <= RESIDENT
    block_rows = BLOCK // SUBLANES, SUBLANES, width
    chunk_rows = CHUNK // SUBLANES, SUBLANES, width
    semaphores = pltpu.SemaphoreType.DMA
    scratch = _Scratch(
        slots=pltpu.SMEM((3 * BLOCK,), jnp.int32),
        steps=pltpu.SMEM((3 * CHUNK,), jnp.int32),
        coefficients=pltpu.SMEM((3 * CHUNK,), jnp.float32),
        rows=None if resident else pltpu.VMEM((2, *chunk_rows), jnp.float32),
        table_in=pltpu.VMEM((3, *block_rows), jnp.float32),
        sums=pltpu.VMEM((BLOCK, width), jnp.float32),
        changed=pltpu.VMEM((2, *block_rows), jnp.float32),
        slots_sem=semaphores((3,)),
        scalars_sem=semaphores((3,)),
        rows_sem=None if resident else semaphores((2,)),
        in_sem=semaphores((3,)),
        out_sem=semaphores((2,)),
        log_sem=semaphores((3,)),
    )
    buffers = rows if resident else scratch.rows, scratch.table_in, scratch.sums, scratch.changed
    in_vmem = sum(4 * math.prod(x.shape) for x in buffers)
    outputs = pl.pallas_call(
        _Kernel(references, resident, with_old_rows),
        in_specs=[
            *[pl.BlockSpec(memory_space=pltpu.SMEM)] * 2,
            *[pl.BlockSpec(memory_space=pltpu.HBM)] * 3,
            pl.BlockSpec(memory_space=pltpu.VMEM if resident else pltpu.HBM),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * (1 + with_old_rows),
        out_shape=[
            jax.ShapeDtypeStruct(values.shape, values.dtype),
            *[jax.ShapeDtypeStruct((blocks, *block_rows), values.dtype)] * with_old_rows,
        ],
        scratch_shapes=scratch,
        # The table is updated in place.
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=in_vmem + 2**21,
            # Checks of every copy's two addresses would take longer than all else. The slots and
            # tokens of `sorted_references` lie inside their arrays.
            disable_bounds_checks=True,
        ),
        interpret=dispatch.interpreted(),
        name="slot_add",
    )(
        in_order.starts,
        groups.num_groups[None],
        in_order.slots,
        in_order.steps,
        in_order.coefficients,
        rows,
        values,
    )
    return outputs[0], outputs[1].reshape(-1, width)[:references] if with_old_rows else None


class _Kernel:
    """The kernel's body."""

    def __init__(self, references: int, resident: bool, with_old_rows: bool):
        self.references, self.resident = references, resident
        self.with_old_rows = with_old_rows

    def __call__(self, starts, num_groups, slots, steps, coefficients, rows, _, table, *refs):
        # The table is also an input (`_`), in the same memory.
        old_rows = refs[0] if self.with_old_rows else table
        of = _Scratch(*refs[self.with_old_rows :])
        resident, width = self.resident, rows.shape[1]
        chunks = pl.cdiv(self.references, CHUNK)
        # Blocks of distinct slots: their number is known on the device only.
        blocks = (num_groups[0] + BLOCK - 1) // BLOCK

        def distinct(b):
            return jnp.minimum(num_groups[0] - b * BLOCK, BLOCK)

        # Copies of one block.

        def slots_copy(b):
            target = of.slots.at[pl.ds(b % 3 * BLOCK, BLOCK)]
            return pltpu.make_async_copy(slots.at[b, 0], target, of.slots_sem.at[b % 3])

        def start_in(b):
            buffer, sem, first = of.table_in.at[b % 3], of.in_sem.at[b % 3], b % 3 * BLOCK

            def start(i, k):
                slot = of.slots[first + i * SUBLANES + k]
                target = buffer.at[i, pl.ds(k, 1)]
                pltpu.make_async_copy(table.at[pl.ds(slot, 1)], target, sem).start()

            _each(distinct(b), start)

        def start_out(b):
            buffer, sem, first = of.changed.at[b % 2], of.out_sem.at[b % 2], b % 3 * BLOCK

            def start(i, k):
                slot = of.slots[first + i * SUBLANES + k]
                source = buffer.at[i, pl.ds(k, 1)]
                pltpu.make_async_copy(source, table.at[pl.ds(slot, 1)], sem).start()

            _each(distinct(b), start)

        def log(b):
            # Rows behind the last distinct slot's are undefined, so blocks are copied whole.
            source, sem = of.table_in.at[b % 3], of.log_sem.at[b % 3]
            return pltpu.make_async_copy(source, old_rows.at[b], sem)

        # Copies of one chunk of references.

        def scalar_copies(c):
            part, sem = pl.ds(c % 3 * CHUNK, CHUNK), of.scalars_sem.at[c % 3]
            return (
                pltpu.make_async_copy(steps.at[c, 0], of.steps.at[part], sem),
                pltpu.make_async_copy(coefficients.at[c, 0], of.coefficients.at[part], sem),
            )

        def in_chunk(c):
            return jnp.minimum(self.references - c * CHUNK, CHUNK)

        def start_rows(c):
            buffer, sem, first = of.rows.at[c % 2], of.rows_sem.at[c % 2], c % 3 * CHUNK

            def start(i, k):
                # A step is the token times 2, plus 1 where a run begins.
                token = of.steps[first + i * SUBLANES + k] >> 1
                target = buffer.at[i, pl.ds(k, 1)]
                pltpu.make_async_copy(rows.at[pl.ds(token, 1)], target, sem).start()

            _each(in_chunk(c), start)

        def enter(c):
            """Makes chunk c ready; starts the copies of later chunks."""

            @pl.when(c + 2 < chunks)
            def _():
                _start(scalar_copies(c + 2))

            @pl.when(c + 1 < chunks)
            def _():
                _wait(scalar_copies(c + 1))
                if not resident:
                    start_rows(c + 1)

            if not resident:
                _wait_for_rows(of.rows.at[c % 2], of.rows_sem.at[c % 2], in_chunk(c))

        def sum_runs(b):
            """Sums the runs of one block, which may share chunks with its neighbours."""
            first, end = starts[b], starts[b + 1]

            def of_chunk(c, carry):
                begin = jnp.maximum(first - c * CHUNK, 0)
                # A block that begins inside a chunk finds it entered by the block before.
                pl.when(begin == 0)(lambda: enter(c))
                offset = c % 3 * CHUNK

                def step(j, carry):
                    total, run = carry
                    token, begins = of.steps[j] >> 1, of.steps[j] & 1
                    if resident:
                        row = rows[pl.ds(token, 1)]
                    else:
                        i = j - offset
                        row = of.rows[c % 2, i >> 3, pl.ds(i & 7, 1)]
                    # A select and no product with 0, so that a NaN stays in its slot.
                    total = jnp.where(begins == 1, 0.0, total) + of.coefficients[j] * row
                    run = run + begins
                    # The sum so far; the last reference of the run leaves the whole one.
                    of.sums[pl.ds(run, 1)] = total
                    return total, run

                last = jnp.minimum(end - c * CHUNK, CHUNK)
                return _in_eights(offset + begin, offset + last, step, carry)

            # The first reference begins a run, and takes number 0.
            carry = jnp.zeros((1, width), jnp.float32), jnp.int32(-1)
            jax.lax.fori_loop(first // CHUNK, (end - 1) // CHUNK + 1, of_chunk, carry)

        def wait_out(b):
            if self.with_old_rows:
                log(b).wait()
            _wait_for_rows(of.changed.at[b % 2], of.out_sem.at[b % 2], distinct(b))

        # Fills the pipeline: three buffers of scalars, two of rows.
        slots_copy(0).start()
        _start(scalar_copies(0))
        if chunks > 1:
            _start(scalar_copies(1))
        slots_copy(0).wait()
        pl.when(blocks > 1)(lambda: slots_copy(1).start())
        start_in(0)
        _wait(scalar_copies(0))
        if not resident:
            start_rows(0)

        @pl.loop(0, blocks)
        def _(b):
            # The buffers of two blocks before must be out before they are filled again.
            @pl.when(b >= 2)
            def _():
                wait_out(b - 2)

            @pl.when(b + 1 < blocks)
            def _():
                slots_copy(b + 1).wait()
                start_in(b + 1)

            @pl.when(b + 2 < blocks)
            def _():
                slots_copy(b + 2).start()

            # The sums of this block, while the rows of the next one arrive.
            sum_runs(b)
            _wait_for_rows(of.table_in.at[b % 3], of.in_sem.at[b % 3], distinct(b))
            before = of.table_in[b % 3]
            # Rows behind the last distinct slot hold what was there, and are not copied out.
            of.changed[b % 2] = before + of.sums[...].reshape(before.shape)
            if self.with_old_rows:
                log(b).start()
            start_out(b)

        # The last two blocks are still under way.
        pl.loop(jnp.maximum(blocks - 2, 0), blocks)(wait_out)


def _start(copies):
    for copy in copies:
        copy.start()


def _wait(copies):
    for copy in copies:
        copy.wait()


def _wait_for_rows(buffer, sem, count):
    """Waits for the first `count` rows of `[n, 8, width]`: once per binary digit of `count`."""
    size = buffer.shape[0] * SUBLANES
    while size:
        some = buffer.at[: size // SUBLANES] if size >= SUBLANES else buffer.at[0, :size]

        @pl.when(count & size != 0)
        def _(some=some):
            pltpu.make_async_copy(some, some, sem).wait()

        size //= 2


def _each(count, body: Callable[[Any, Any], None]):
    """`body(i, k)` for the positions 8 * i + k below `count`."""

    @pl.loop(0, count >> 3)
    def _(i):
        for k in range(SUBLANES):
            body(i, k)

    pl.loop(0, count & 7)(lambda k: body(count >> 3, k))


def _in_eights(begin, end, step, carry):
    """`carry = step(j, carry)` for j from `begin` to `end`."""

    def eight(i, carry):
        for k in range(SUBLANES):
            carry = step(begin + i * SUBLANES + k, carry)
        return carry

    eights = (end - begin) >> 3
    carry = jax.lax.fori_loop(0, eights, eight, carry)
    return jax.lax.fori_loop(begin + eights * SUBLANES, end, step, carry)
