"""Mosaic GPU kernels: a warpgroup owns a few rows and adds up their references in order.

A run is all references to one slot, contiguous in sorted order. Most slots of a chunk are read once
or twice, a few very often. Therefore the sorted references are cut into segments of `SEGMENT`. A
first kernel sums the parts of long runs in each segment; it ends at once if there are none. A
second kernel adds to each row either its references or the sums of its segments. Each row has one
owner, so no two programs write to the same row.

What an owner must know of a row stands in one record, which XLA makes for all chunks at once. So it
waits for the record and then for rows, not for the order, a reference and a coefficient in turn.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fwpkm_jax.core.slots.values.exchange import logged_rows
from fwpkm_jax.core.slots.values.grouping import SlotGroups
from pallas_kernels.mosaic_gpu import IN_FLIGHT, index32, launch, row, sequential_vmap, zeros

SEGMENT = 64
"""Longest run that its owner sums from references. For a longer run the owner takes one step per
`IN_FLIGHT` segments, and each segment one step per `IN_FLIGHT` references; this size keeps both
numbers small."""
OWNED = 4
"""Rows of one program. They are loaded together, because each needs two dependent loads."""
FIRST = 2
"""References of a run that its record holds: most runs have no more."""


class Runs(NamedTuple):
    """The references of all chunks by slot, with a record for each run.

    Attributes:
      groups: the slots that tokens read, leaves `[chunks, ...]`.
      coefficients: of each reference, `[chunks, references]`.
      records: of each distinct slot the row that its sum is added to, the sorted positions where
        its run begins and ends, and the tokens of its first references,
        `[chunks, slots, 3 + FIRST]`. Where a chunk has no more slots, the run is empty.
      factors: the coefficients of these references, 0 where the run has fewer or is longer than
        `SEGMENT`, `[chunks, slots, FIRST]`.
    """

    groups: SlotGroups
    coefficients: jax.Array
    records: jax.Array
    factors: jax.Array


def runs_of(groups: SlotGroups, coefficients: jax.Array, source: jax.Array) -> Runs:
    """The runs of all chunks.

    Args:
      groups: the slots that tokens read, leaves `[chunks, ...]`.
      coefficients: `[chunks, tokens, places]`.
      source: the row of the table that the sum of each distinct slot is added to,
        `[chunks, slots]`, or more than there can be distinct slots.
    """
    (chunks, _, places), slots = coefficients.shape, source.shape[1]
    coefficients = coefficients.reshape(chunks, -1)
    # A program owns as many rows whatever the number of slots.
    filled = pl.cdiv(slots, OWNED) * OWNED

    def of_slots(x: jax.Array) -> jax.Array:
        return jnp.pad(x[:, :slots], ((0, 0), (0, filled - slots)))

    exists = jnp.arange(filled, dtype=jnp.int32)[None] < groups.num_groups[:, None]
    # The entries after a chunk's last slot name rows outside the table.
    source = jnp.where(exists, of_slots(source), 0)
    begin, end = (of_slots(x) for x in (groups.starts, groups.starts[:, 1:]))
    end = jnp.where(exists, end, begin)
    # A long run is summed by segments, so that its owner adds none of its references.
    is_short = end - begin <= SEGMENT
    fields, factors = [source, begin, end], []
    for i in range(FIRST):
        position = jnp.clip(begin + i, 0, jnp.maximum(end - 1, 0))
        reference = jnp.take_along_axis(groups.order, position, axis=1, mode="promise_in_bounds")
        factor = jnp.take_along_axis(coefficients, reference, axis=1, mode="promise_in_bounds")
        fields.append(reference // places)
        factors.append(jnp.where(is_short & (begin + i < end), factor, 0.0))
    return Runs(groups, coefficients, jnp.stack(fields, axis=-1), jnp.stack(factors, axis=-1))


def add(
    values: jax.Array,
    groups: SlotGroups,
    coefficients: jax.Array,
    rows: jax.Array,
    *,
    with_old_rows: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """`slot_add` in place; with `with_old_rows` also the changed rows before the addition."""
    one = functools.partial(_add, with_old_rows=with_old_rows)
    return sequential_vmap(one)(values, groups, coefficients, rows)


# Compiled, because a ref in GPU memory exists only inside a compiled function.
@functools.partial(jax.jit, static_argnames="with_old_rows")
def _add(values, groups, coefficients, rows, *, with_old_rows):

    def store(chunk, group, slot, old, new, table, *old_rows):
        table[slot] = new
        if with_old_rows:
            old_rows[0][group] = old

    table = jax.new_ref(values, memory_space=plgpu.GMEM)
    shape = (groups.order.shape[-1], rows.shape[1])
    groups, coefficients = jax.tree.map(lambda x: x[None], (groups, coefficients))
    runs = runs_of(groups, coefficients, groups.slots)
    logs = _sum_runs(
        jnp.zeros((), jnp.int32),
        runs,
        rows,
        (table,),
        store=store,
        out_type=[jax.ShapeDtypeStruct(shape, values.dtype)] * with_old_rows,
    )
    return jax.freeze(table), logs[0] if with_old_rows else None


@jax.jit
def add_logged(
    values: jax.Array,
    log: jax.Array,
    chunk: jax.Array,
    runs: Runs,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`slot_add` in place; the changed rows before the addition go to the chunk's part of `log`.

    Args:
      values: `[slots, value]`.
      log: `[logged, value]`, updated in place.
      runs: of all chunks; each sum is added to its slot.
      rows: of this chunk, `[tokens, value]`.
    """
    distinct = logged_rows(values.shape[0], runs.groups)

    def store(chunk, group, slot, old, new, table, log):
        table[slot] = new
        log[chunk * distinct + group] = old

    table, log_ref = (jax.new_ref(x, memory_space=plgpu.GMEM) for x in (values, log))
    _sum_runs(chunk, runs, rows, (table, log_ref), store=store)
    return jax.freeze(table), jax.freeze(log_ref)


@functools.partial(jax.jit, static_argnames="distinct")
def add_to_log(
    log: jax.Array,
    chunk: jax.Array,
    runs: Runs,
    rows: jax.Array,
    *,
    distinct: int,
) -> jax.Array:
    """`log[start + g] = log[source[g]] + sum of coefficients * rows` of slot g, in place.

    Args:
      log: `[logged, value]`, updated in place. The chunk's part begins at `start`.
      runs: of all chunks; their sources are none of the rows that are written.
      rows: of this chunk, `[tokens, value]`.
    """

    def store(chunk, group, source, old, new, log):
        log[chunk * distinct + group] = new

    ref = jax.new_ref(log, memory_space=plgpu.GMEM)
    _sum_runs(chunk, runs, rows, (ref,), store=store)
    return jax.freeze(ref)


def _sum_runs(
    chunk: jax.Array,
    runs: Runs,
    rows: jax.Array,
    refs: tuple[Any, ...],
    *,
    store: Callable[..., None],
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
) -> Any:
    """Sums the references to each distinct slot, and stores the sums.

    Args:
      runs: of all chunks: a loop passes all of them, because a slice would be a launch.
      rows: of this chunk, `[tokens, value]`.
      refs: what `store` needs; the first one is the table.
      store: takes chunk, a distinct slot's number, the row's index in the table, the row, the row
        plus the sum, `refs` and outputs.
    """
    chunk = chunk[None]
    partial_sums = _partial_sums(chunk, runs, rows)

    def body(program, chunk, records, factors, order, coefficients, rows, sums, *refs):
        chunk = chunk[0]
        owned = [program * OWNED + i for i in range(OWNED)]
        record = [[records[chunk, slot, field] for field in range(3 + FIRST)] for slot in owned]
        # One load for each field, shared by all threads.
        source, begin, end, *tokens = zip(*record, strict=True)
        factor = [[factors[chunk, slot, i] for i in range(FIRST)] for slot in owned]

        def own():
            # All loads come before the sums: four rows wait for memory together.
            old = [row(refs[0], s) for s in source]
            first = [[row(rows, token) for token in of_one] for of_one in zip(*tokens, strict=True)]
            total = []
            for i in range(OWNED):
                is_long = end[i] - begin[i] > SEGMENT
                # The record has had the first references; those after them are found by the order.
                others = begin[i] + FIRST
                summed = functools.reduce(
                    operator.add, [f * x for f, x in zip(factor[i], first[i], strict=True)]
                )
                summed = _add_references(
                    summed,
                    chunk,
                    order,
                    coefficients,
                    rows,
                    begin=others,
                    end=jnp.where(is_long, others, end[i]),
                )
                total.append(
                    _add_partial_sums(summed, sums, begin[i], jnp.where(is_long, end[i], begin[i]))
                )
            for i in range(OWNED):

                @pl.when(begin[i] < end[i])
                def _(i=i):
                    store(chunk, owned[i], source[i], old[i], old[i] + total[i], *refs)

        # Empty runs stand after all others.
        pl.when(begin[0] < end[0])(own)

    return launch(
        body,
        chunk,
        runs.records,
        runs.factors,
        runs.groups.order,
        runs.coefficients,
        rows,
        partial_sums,
        *refs,
        programs=runs.records.shape[1] // OWNED,
        out_type=out_type,
        name="slot_add",
    )


def _partial_sums(chunk: jax.Array, runs: Runs, rows: jax.Array) -> jax.Array:
    """Each segment's partial sums of long runs, `[segments, 2, value]`.

    Entry 0 belongs to the run that contains the segment's first reference, entry 1 to the run that
    contains its last reference, if that is a different run. Entries of runs up to `SEGMENT` are
    neither written nor read.
    """
    groups, coefficients = runs.groups, runs.coefficients
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
                    zeros(width),
                    chunk,
                    order,
                    coefficients,
                    rows,
                    begin=jnp.maximum(begin, segment_begin),
                    end=jnp.minimum(end, segment_end),
                )

        # A segment touches at most two long runs: a third would be shorter than the segment.
        sum_part(0, head, True)
        sum_part(1, tail, tail != head)

    (sums,) = launch(
        body,
        chunk,
        groups.order,
        groups.rank.reshape(-1, references),
        groups.starts,
        coefficients,
        rows,
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
        # Positions behind the end load the last reference once more, with coefficient 0: a branch
        # per row would keep the loads from running together.
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
