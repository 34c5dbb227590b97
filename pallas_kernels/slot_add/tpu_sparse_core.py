"""SparseCore kernel: each subcore owns the slots of a part of the sorted references.

A part begins where the references to a slot begin, so each row has one owner, which sums its
references in order. A subcore gathers the tokens' rows and, at the last reference to a slot, the
table's row; it adds them up and scatters the sums. While it works on one block of references, it
receives the rows of the next block and stores those of the previous one.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fwpkm_jax.core.slots.grouping import SlotGroups
from pallas_kernels import sparse_core
from pallas_kernels.slot_add.sorted_references import SortedReferences, sorted_references
from pallas_kernels.sparse_core import IGNORED

BLOCK = 32 * 1024
"""Size of a block's rows in bytes; a subcore's memory holds six blocks."""
POSITIONS = 8
"""References that are summed in one loop step."""


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
    block = max(16, min(64, BLOCK // (width * 4) // 16 * 16))
    cores = sparse_core.subcores()
    in_order = sorted_references(groups, coefficients, multiple=block)
    results = sparse_core.launch(
        functools.partial(_work, _Shape(block, cores.lanes, with_old_rows)),
        _parts(groups.starts, cores.number, cores.lanes),
        _by_block(in_order, coefficients.shape[1], block),
        *(in_order.coefficients, rows),
        table=values,
        out_type=[jax.ShapeDtypeStruct((references, width), values.dtype)] * with_old_rows,
        scratch=[
            pltpu.VMEM((cores.lanes,), jnp.int32),
            pltpu.VMEM((_HELD * 3 * block,), jnp.int32),
            pltpu.VMEM((_HELD * block,), jnp.float32),
            *[pltpu.VMEM((_HELD * block,), jnp.int32)] * 2,
            *[pltpu.VMEM((2, block, width), jnp.float32)] * 3,
            pltpu.VMEM((width,), jnp.float32),
            *[pltpu.SemaphoreType.DMA((_HELD,))] * 2,
            *[pltpu.SemaphoreType.DMA((2,))] * 4,
        ],
        name="slot_add",
    )
    return results[0], results[1] if with_old_rows else None


_HELD = 4
"""Blocks whose indices are in a subcore's memory: two are being loaded, two are being stored."""


def _parts(starts: jax.Array, subcores: int, lanes: int) -> jax.Array:
    """Begin and end of each subcore's part in the sorted positions, in one vector per subcore."""
    references = starts.shape[0] - 1
    share = jnp.arange(subcores + 1, dtype=jnp.int32) * references // subcores
    bounds = starts[jnp.searchsorted(starts, share, method="compare_all")]
    parts = jnp.stack([bounds[:-1], bounds[1:]], axis=1)
    return jnp.pad(parts, [(0, 0), (0, lanes - 2)]).reshape(-1)


def _by_block(in_order: SortedReferences, places: int, block: int) -> jax.Array:
    """Tokens, ended slots and ended groups of each block, in this order."""
    tokens = in_order.references // places
    columns = (tokens, in_order.ended_slots, in_order.ended_groups)
    return jnp.stack([x.reshape(-1, block) for x in columns], axis=1).reshape(-1)


@dataclass(frozen=True)
class _Shape:
    block: int
    lanes: int
    with_old_rows: bool


def _work(shape: _Shape, subcore: Any, parts, indices, coefficients, rows, table, *refs):
    """The kernel's body: processes one subcore's part."""
    block, lanes = shape.block, shape.lanes
    old_rows, refs = (refs[0], refs[1:]) if shape.with_old_rows else (table, refs)
    part, held, factors, slots, groups, rows_in, table_in, table_out, carried, *sems = refs
    held_sem, factor_sem, rows_sem, in_sem, out_sem, log_sem = sems
    width = carried.shape[0]

    fetch = sparse_core.load(
        parts.at[pl.ds(pl.multiple_of(subcore * lanes, lanes), lanes)], part, held_sem.at[0]
    )
    fetch.start()
    fetch.wait()
    bounds = part[...]
    begin, end = bounds[0], bounds[1]
    first = begin // block
    count = jnp.where(end > begin, jax.lax.div(end + (block - 1), np.int32(block)) - first, 0)

    def piece(array, i, size):
        return array.at[pl.ds(pl.multiple_of(i * size, 8), size)]

    def fetches(i):
        k = i % _HELD
        for source, target, sem, size in (
            (indices, held, held_sem, 3 * block),
            (coefficients, factors, factor_sem, block),
        ):
            yield sparse_core.load(
                piece(source, first + i, size), piece(target, k, size), sem.at[k]
            )

    def keep_own(i):
        """Keeps slots and groups of runs that end in this part; sets the others to `IGNORED`."""
        k = i % _HELD
        for offset in range(0, block, lanes):
            position = (first + i) * block + offset + jax.lax.iota(jnp.int32, lanes)
            own = (position >= begin) & (position < end)
            for n, target in ((1, slots), (2, groups)):
                all_ended = held[pl.ds((3 * k + n) * block + offset, lanes)]
                target[pl.ds(k * block + offset, lanes)] = jnp.where(own, all_ended, IGNORED)

    def gathers(i):
        k, ring = i % _HELD, i % 2
        tokens = held.at[pl.ds(pl.multiple_of(3 * k * block, 8), block)]
        yield sparse_core.gather(rows, tokens, rows_in.at[ring], rows_sem.at[ring])
        own_slots = piece(slots, k, block)
        yield sparse_core.gather(table, own_slots, table_in.at[ring], in_sem.at[ring])

    def logs(i):
        if shape.with_old_rows:
            ring, own_groups = i % 2, piece(groups, i % _HELD, block)
            yield sparse_core.scatter(table_in.at[ring], own_groups, old_rows, log_sem.at[ring])

    def writes(i):
        ring, own_slots = i % 2, piece(slots, i % _HELD, block)
        yield sparse_core.scatter(table_out.at[ring], own_slots, table, out_sem.at[ring])

    def sum_block(i):
        k, ring = i % _HELD, i % 2

        @pl.loop(0, block, step=POSITIONS)
        def _(at):
            def number(array, offset):
                return sparse_core.take(array, jnp.full(lanes, offset, jnp.int32))

            some = range(POSITIONS)
            factor = [number(factors, k * block + at + p) for p in some]
            ended = [number(held, (3 * k + 1) * block + at + p) >= 0 for p in some]

            def add_up(columns):
                total = carried[columns]
                for p in some:
                    total += factor[p] * rows_in[ring, at + p, columns]
                    # If no run ends here, this value is not used: `scatter` ignores its row.
                    table_out[ring, at + p, columns] = table_in[ring, at + p, columns] + total
                    total = jnp.where(ended[p], 0.0, total)
                carried[columns] = total

            sparse_core.for_columns(width, lanes, add_up)

    def start(copies, i):
        for copy in copies(i):
            copy.start()

    def wait(copies, i):
        for copy in copies(i):
            copy.wait()

    def clear(columns):
        carried[columns] = jnp.zeros(lanes, jnp.float32)

    sparse_core.for_columns(width, lanes, clear)

    def make_ready(i):
        wait(fetches, i)
        keep_own(i)
        pl.when(i >= 2)(lambda: wait(logs, i - 2))  # They read the buffers that are refilled next.
        start(gathers, i)
        pl.when(i + 1 < count)(lambda: start(fetches, i + 1))

    @pl.when(count > 0)
    def _():
        start(fetches, 0)
        make_ready(0)

    @pl.loop(0, count)
    def _(i):
        pl.when(i + 1 < count)(lambda: make_ready(i + 1))
        wait(gathers, i)
        start(logs, i)
        pl.when(i >= 2)(lambda: wait(writes, i - 2))
        sum_block(i)
        start(writes, i)

    @pl.loop(jnp.maximum(count - 2, 0), count)
    def _(i):
        wait(logs, i)
        wait(writes, i)
