"""Mosaic GPU kernels: a warpgroup owns a few rows and adds up their references in order.

A run is all references to one slot, contiguous in sorted order. Most slots of a chunk are read once
or twice, a few very often. Therefore the sorted references are cut into segments of `SEGMENT`. A
first kernel sums the parts of long runs in each segment; it ends at once if there are none. A
second kernel adds to each row either its references or the sums of its segments. Each row has one
owner, so no two programs write to the same row.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fwpkm_jax.core.slots.grouping import SlotGroups
from fwpkm_jax.core.slots.row_ops import logged_rows
from pallas_kernels.mosaic_gpu import IN_FLIGHT, index32, launch, row, zeros

SEGMENT = 64
"""Longest run that its owner sums from references. For a longer run the owner takes one step per
`IN_FLIGHT` segments, and each segment one step per `IN_FLIGHT` references; this size keeps both
numbers small."""
OWNED = 4
"""Rows of one program. They are loaded together, because each needs three dependent loads."""


# Compiled, because a ref in GPU memory exists only inside a compiled function.
@functools.partial(jax.jit, static_argnames="with_old_rows")
def add(
    values: jax.Array,
    groups: SlotGroups,
    coefficients: jax.Array,
    rows: jax.Array,
    *,
    with_old_rows: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """`slot_add` in place; with `with_old_rows` also the changed rows before the addition."""

    def store(chunk, group, slot, old, new, table, *old_rows):
        table[slot] = new
        if with_old_rows:
            old_rows[0][group] = old

    table = jax.new_ref(values, memory_space=plgpu.GMEM)
    shape = (groups.order.shape[-1], rows.shape[1])
    groups, coefficients = jax.tree.map(lambda x: x[None], (groups, coefficients))
    logs = _sum_runs(
        *(jnp.zeros((), jnp.int32), groups, coefficients, rows, (table,)),
        source=lambda chunk, group, slots, table, *old_rows: slots[chunk, group],
        store=store,
        out_type=[jax.ShapeDtypeStruct(shape, values.dtype)] * with_old_rows,
    )
    return jax.freeze(table), logs[0] if with_old_rows else None


@jax.jit
def add_logged(
    values: jax.Array,
    log: jax.Array,
    chunk: jax.Array,
    groups: SlotGroups,
    coefficients: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`slot_add` in place; the changed rows before the addition go to the chunk's part of `log`.

    Args:
      values: `[slots, value]`.
      log: `[logged, value]`, updated in place.
      chunk: which of the chunks.
      groups: the slots that tokens read, of all chunks.
      coefficients: `[chunks, tokens, places]`.
      rows: of this chunk, `[tokens, value]`.
    """
    distinct = logged_rows(values.shape[0], groups)

    def store(chunk, group, slot, old, new, table, log):
        table[slot] = new
        log[chunk * distinct + group] = old

    table, log_ref = (jax.new_ref(x, memory_space=plgpu.GMEM) for x in (values, log))
    _sum_runs(
        *(chunk, groups, coefficients, rows, (table, log_ref)),
        source=lambda chunk, group, slots, *refs: slots[chunk, group],
        store=store,
    )
    return jax.freeze(table), jax.freeze(log_ref)


@jax.jit
def add_kept(
    kept: jax.Array,
    later: jax.Array,
    chunk: jax.Array,
    groups: SlotGroups,
    coefficients: jax.Array,
    rows: jax.Array,
) -> jax.Array:
    """`kept[start + g] = kept[later[g]] + sum of coefficients * rows` of distinct slot g, in place.

    Args:
      kept: `[logged, value]`, updated in place. The chunk's part begins at `start`.
      later: `[chunks, distinct]`; none of the rows that are written.
      chunk: which of the chunks.
      groups: the slots that tokens read, of all chunks.
      coefficients: `[chunks, tokens, places]`.
      rows: of this chunk, `[tokens, value]`.
    """
    distinct = later.shape[1]

    def store(chunk, group, slot, old, new, kept, later):
        kept[chunk * distinct + group] = new

    ref = jax.new_ref(kept, memory_space=plgpu.GMEM)
    _sum_runs(
        *(chunk, groups, coefficients, rows, (ref, later)),
        source=lambda chunk, group, slots, kept, later: later[chunk, group],
        store=store,
    )
    return jax.freeze(ref)


def _sum_runs(
    chunk: jax.Array,
    groups: SlotGroups,
    coefficients: jax.Array,
    rows: jax.Array,
    refs: tuple[Any, ...],
    *,
    source: Callable[..., jax.Array],
    store: Callable[..., None],
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
) -> Any:
    """Sums the references to each distinct slot, and stores the sums.

    Args:
      chunk: which of the chunks.
      groups: the slots that tokens read, leaves `[chunks, ...]`: a loop passes all of them, because
        a slice would be a launch.
      coefficients: `[chunks, tokens, places]`.
      rows: of this chunk, `[tokens, value]`.
      refs: what `source` and `store` need; the first one is the table.
      source: from the chunk, a distinct slot's number, the distinct slots, `refs` and outputs to
        the row of the table that its sum is added to.
      store: takes chunk and number, that row's index, the row, the row plus the sum, `refs` and
        outputs.
      out_type: outputs.
    """
    chunks, tokens, places = coefficients.shape
    references = tokens * places
    coefficients = coefficients.reshape(chunks, references)
    chunk = chunk[None]
    partial_sums = _partial_sums(chunk, groups, coefficients, rows)

    def body(program, chunk, order, slots, starts, num_groups, coefficients, rows, sums, *refs):
        chunk = chunk[0]
        first, stop = program * OWNED, num_groups[chunk]

        def own():
            owned = [jnp.minimum(first + i, stop - 1) for i in range(OWNED)]
            slot = [source(chunk, group, slots, *refs) for group in owned]
            begin = [starts[chunk, group] for group in owned]
            end = [starts[chunk, group + 1] for group in owned]
            is_long = [e - b > SEGMENT for b, e in zip(begin, end, strict=True)]
            old = [row(refs[0], s) for s in slot]
            reference = [order[chunk, b] for b in begin]
            factor = [
                jnp.where(long, 0.0, coefficients[chunk, r])
                for long, r in zip(is_long, reference, strict=True)
            ]
            total = [f * row(rows, r // places) for f, r in zip(factor, reference, strict=True)]
            for i in range(OWNED):
                others = begin[i] + 1
                total[i] = _add_references(
                    *(total[i], chunk, order, coefficients, rows),
                    begin=others,
                    end=jnp.where(is_long[i], others, end[i]),
                )
                total[i] = _add_partial_sums(
                    total[i], sums, begin[i], jnp.where(is_long[i], end[i], begin[i])
                )
            for i in range(OWNED):

                @pl.when(first + i < stop)
                def _(i=i):
                    store(chunk, owned[i], slot[i], old[i], old[i] + total[i], *refs)

        pl.when(first < stop)(own)

    return launch(
        body,
        *(chunk, groups.order, groups.slots, groups.starts, groups.num_groups),
        *(coefficients, rows, partial_sums, *refs),
        programs=pl.cdiv(references, OWNED),
        out_type=out_type,
        name="slot_add",
    )


def _partial_sums(
    chunk: jax.Array, groups: SlotGroups, coefficients: jax.Array, rows: jax.Array
) -> jax.Array:
    """Each segment's partial sums of long runs, `[segments, 2, value]`.

    Entry 0 belongs to the run that contains the segment's first reference, entry 1 to the run that
    contains its last reference, if that is a different run. Entries of runs up to `SEGMENT` are
    neither written nor read.
    """
    references, width = coefficients.shape[1], rows.shape[1]
    segments = pl.cdiv(references, SEGMENT)

    def body(segment, chunk, order, rank, starts, coefficients, rows, sums):
        chunk = chunk[0]
        segment_begin = segment * SEGMENT
        segment_end = jnp.minimum(segment_begin + SEGMENT, references)
        ends = (order[chunk, segment_begin], order[chunk, segment_end - 1])
        head, tail = (rank[chunk, reference] for reference in ends)

        def sum_part(which, group, exists):
            begin, end = starts[chunk, group], starts[chunk, group + 1]

            @pl.when(exists & (end - begin > SEGMENT))
            def _():
                sums[segment, which] = _add_references(
                    *(zeros(width), chunk, order, coefficients, rows),
                    begin=jnp.maximum(begin, segment_begin),
                    end=jnp.minimum(end, segment_end),
                )

        sum_part(0, head, True)
        sum_part(1, tail, tail != head)

    (sums,) = launch(
        body,
        *(chunk, groups.order, groups.rank.reshape(-1, references), groups.starts),
        *(coefficients, rows),
        programs=segments,
        out_type=[jax.ShapeDtypeStruct((segments, 2, width), jnp.float32)],
        name="slot_add_segments",
    )
    return sums


def _add_references(total, chunk, order, coefficients, rows, *, begin, end):
    """Adds the references at sorted positions `begin` to `end` to `total`, in order."""
    places = coefficients.shape[1] // rows.shape[0]

    def step(i, total):
        i = index32(i)
        position = [begin + i * IN_FLIGHT + j for j in range(IN_FLIGHT)]
        reference = [order[chunk, jnp.minimum(p, end - 1)] for p in position]
        row_of = [row(rows, r // places) for r in reference]
        for p, r, x in zip(position, reference, row_of, strict=True):
            total += jnp.where(p < end, coefficients[chunk, r], 0.0) * x
        return total

    return jax.lax.fori_loop(0, _steps(end - begin), step, total)


def _add_partial_sums(total, sums, begin, end):
    """Adds the segments' sums of the run at sorted positions `begin` to `end` to `total`."""
    first, last = begin // SEGMENT, (end - 1) // SEGMENT
    # The run is the last one of its first segment, unless it begins where the segment begins.
    part_of_first = (begin % SEGMENT != 0).astype(jnp.int32)
    count = jnp.where(end > begin, last - first + 1, 0)

    def step(i, total):
        i = index32(i)
        segment = [first + i * IN_FLIGHT + j for j in range(IN_FLIGHT)]
        inside = [jnp.minimum(s, last) for s in segment]
        part = [jnp.where(s == first, part_of_first, 0) for s in inside]
        summed = [row(sums, (s, p)) for s, p in zip(inside, part, strict=True)]
        for s, x in zip(segment, summed, strict=True):
            total += jnp.where(s <= last, 1.0, 0.0) * x
        return total

    return jax.lax.fori_loop(0, _steps(count), step, total)


def _steps(references: jax.Array) -> jax.Array:
    """Number of steps of `IN_FLIGHT` references, as int32 even if 64-bit types are enabled."""
    return jax.lax.div(references + (IN_FLIGHT - 1), np.int32(IN_FLIGHT))
