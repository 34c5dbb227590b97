"""A sequence's reads and writes of a value table, all chunks, with a backward pass of its own.

Slots and read weights must be known beforehand. The keys never read the values, so one scan over
the chunks finds every slot and a second scan, in this file, handles the values. Per chunk c, with
the table V as earlier chunks left it:

    y[t] = sum_p w[t, p] V[i[t, p]]         read
    e[t] = m[t] (y[t] - v[t])               error
    V[i] += sum over the places that read slot i of s[t, p] e[t]

Columns of the table do not interact: any slice of columns of V, v and y gives the same slice of the
results, and the cotangents of w, s and m are sums over the slices.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import ValueTable
from fwpkm_jax.core.platform import by_platform
from fwpkm_jax.core.slots.values.exchange import ChunkRows, RowOps, logged_rows, of_chunk
from fwpkm_jax.core.slots.values.grouping import SlotGroups
from fwpkm_jax.core.slots.write import ValueWrite


class ValueScanOutput(NamedTuple):
    """The table after the last chunk, and what each chunk read and changed.

    Attributes:
      values: `[slots, value]`.
      output: y, `[chunks, tokens, value]`.
      squared_change: `[chunks, tokens]`; a chunk's sum is the squared norm of its change of the
        table. Without a gradient.
    """

    values: ValueTable
    output: Float[Array, "chunks tokens value"]
    squared_change: Float[Array, "chunks tokens"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def value_scan(
    values: ValueTable,
    slot_ids: Int[Array, "chunks tokens places"],
    rows: ChunkRows,
    groups: SlotGroups,
    write: ValueWrite,
    ops: RowOps,
) -> ValueScanOutput:
    """Reads and writes every chunk, the table updated in place.

    The backward pass keeps the touched rows from before each write and overwrites them with their
    cotangents. A gradient of the whole table is computed only where the gradient of `values` is
    used.

    Args:
      values: the table before the first chunk.
      rows: what is read and written there, leaves `[chunks, ...]`.
      groups: `group_slots` of each chunk, leaves `[chunks, ...]`.
      write: its formulas; the steps are in the rows already.
    """
    scan = ops.batched(functools.partial(_scan_and_log, ops, write))
    return scan(values, slot_ids, rows, groups)[0]


# `jit` traces a scan once for equal arguments, so a model with several memories lowers it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _scan_and_log(ops, write, values, slot_ids, rows, groups) -> tuple[ValueScanOutput, jax.Array]:
    """The scan, and the touched rows before each write: `[chunks * distinct + 1, value]`.

    The last row is zero: it stands for a row that no later chunk touches.
    """
    distinct = logged_rows(values.shape[0], groups)
    runs = groups
    if ops.runs is not None:  # Kernels sort what they need of all chunks once.
        runs = ops.runs(groups, rows.steps, groups.slots[:, :distinct])

    # The loop carries table, log and reads, and each step changes a part of them: XLA does so in
    # place if every read of the old rows is computed before the write, see `exchange_rows`.
    def body(carry, _):
        chunk, values, log, read = carry
        values, log, output, errors = ops.exchange(write, values, log, chunk, slot_ids, runs, rows)
        read = jax.lax.dynamic_update_index_in_dim(read, output, chunk, axis=0)
        # |change of a row|^2 = <change, sum of its references' steps * errors>.
        ids, rank, steps = of_chunk(chunk, (slot_ids, groups.rank, rows.steps))
        before = ops.dot(log, chunk * distinct + rank, errors)
        change = ops.dot(values, ids, errors) - before
        return (chunk + 1, values, log, read), jnp.sum(steps * change, axis=-1)

    chunks = slot_ids.shape[0]
    # The rows as they were before each write: the backward pass reads them.
    log = ops.new_rows((chunks * distinct + 1, values.shape[1]), values.dtype)
    # The number of the chunk is carried: a slice of all numbers would be a launch. The reads are
    # carried, too: what a scan stacks would first be filled with zeros.
    start = (
        *(jnp.zeros((), jnp.int32), values, log),
        ops.new_rows(rows.targets.shape, rows.targets.dtype),
    )
    (_, values, log, read), change = jax.lax.scan(body, start, length=chunks)
    return ValueScanOutput(values, read, change), log


class _Residuals(NamedTuple):
    log: jax.Array
    output: jax.Array
    rows: ChunkRows
    groups: SlotGroups
    slots: jax.Array  # [slots, 0], for the number of slots
    table: jax.Array | None  # an array only if the gradient of the table is used


def _scan_forward(values, slot_ids, rows, groups, write, ops):
    asked = values.perturbed
    values, slot_ids, rows, groups = jax.tree.map(
        lambda x: x.value, (values, slot_ids, rows, groups)
    )
    scan = ops.batched(functools.partial(_scan_and_log, ops, write))
    output, log = scan(values, slot_ids, rows, groups)
    slots = jnp.zeros((values.shape[0], 0), values.dtype)
    table = jnp.zeros((), values.dtype) if asked else None
    return output, _Residuals(log, output.output, rows, groups, slots, table)


def _scan_backward(write, ops, residuals, cotangents):
    """Goes from the last chunk to the first; each puts the cotangents of its rows into its log.

    A row's cotangent is that of the same slot's row in the next chunk that touched it, plus what
    this chunk's reads add. `next_rows` holds the place of that row, so no table is needed.
    """
    output_bar, values_bar = cotangents.output, cotangents.values
    if _is_zero(output_bar):
        output_bar = jnp.zeros_like(residuals.output)
    scan = ops.batched(functools.partial(_scan_back, ops, write))
    values_bar, rows_bar = scan(residuals, output_bar, None if _is_zero(values_bar) else values_bar)
    return values_bar, None, rows_bar, None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scan_back(
    ops, write, residuals, output_bar, written_bar
) -> tuple[jax.Array | None, ChunkRows]:
    """Cotangents of the table before the scan, if they are used, and of the rows.

    `written_bar` are those of the table after it, None if they are zero.
    """
    log, output, rows, groups, slots, table = residuals
    num_slots, chunks = slots.shape[0], output.shape[0]
    # Behind the log stand the rows that no later chunk touches: one of zeros, or the whole table's
    # cotangents.
    end = log.shape[0] - 1
    untouched = jnp.full((num_slots,), end, jnp.int32)
    if written_bar is not None:
        log = jnp.concatenate([log[:end], written_bar])
        untouched = end + jnp.arange(num_slots, dtype=jnp.int32)
    touched = groups.slots[:, : logged_rows(num_slots, groups)]
    next_rows = next_rows_of(touched, untouched)

    runs = groups if ops.runs is None else ops.runs(groups, rows.weights, next_rows)

    def body(carry, _):
        chunk, log, targets_bar = carry
        log, rows_bar = ops.exchange_back(
            write, log, chunk, next_rows, runs, rows, output, output_bar
        )
        targets_bar = jax.lax.dynamic_update_index_in_dim(
            targets_bar, rows_bar.targets, chunk, axis=0
        )
        return (chunk - 1, log, targets_bar), rows_bar._replace(targets=None)

    start = (
        *(jnp.full((), chunks - 1, jnp.int32), log),
        ops.new_rows(rows.targets.shape, rows.targets.dtype),
    )
    (_, log, targets_bar), rows_bar = jax.lax.scan(body, start, length=chunks, reverse=True)
    values_bar = None
    if table is not None:
        places = jnp.arange(touched.size, dtype=jnp.int32)
        # The earliest row of a slot holds its cotangent before the first chunk.
        first = untouched.at[touched.reshape(-1)].min(places, mode="drop")
        values_bar = log.at[first].get(mode="promise_in_bounds")
    return values_bar, rows_bar._replace(targets=targets_bar)


def next_rows_of(
    touched: Int[Array, "chunks distinct"], untouched: Int[Array, " slots"]
) -> Int[Array, "chunks distinct"]:
    """Where the next chunk that touches the same slot has logged its row, for each logged row.

    Args:
      touched: the slots whose rows are logged; the same slot at most once in a chunk. Rows of slots
        outside the table are not used.
      untouched: the place for a slot that no later chunk touches.
    """
    return by_platform(cpu=_next_in_turn, default=_next_by_sort)(touched, untouched)


def _next_in_turn(
    touched: Int[Array, "chunks distinct"], untouched: Int[Array, " slots"]
) -> Int[Array, "chunks distinct"]:
    """`next_rows_of`, one chunk after the other."""
    places = jnp.arange(touched.size, dtype=jnp.int32).reshape(touched.shape)

    def body(latest, chunk):
        slots, places = chunk
        next_rows = latest.at[slots].get(mode="fill", fill_value=0)
        latest = latest.at[slots].set(places, mode="drop", unique_indices=True)
        return latest, next_rows

    return jax.lax.scan(body, untouched, (touched, places), reverse=True)[1]


def _next_by_sort(
    touched: Int[Array, "chunks distinct"], untouched: Int[Array, " slots"]
) -> Int[Array, "chunks distinct"]:
    """`next_rows_of` of all chunks at once: sorted by slot, the next row is the neighbour."""
    places = jnp.arange(touched.size, dtype=jnp.int32)
    slots, order = jax.lax.sort((touched.reshape(-1), places), num_keys=1, is_stable=True)
    is_followed = (slots == jnp.append(slots[1:], -1)) & (slots < untouched.size)
    alone = untouched.at[slots].get(mode="fill", fill_value=0)
    following = jnp.where(is_followed, jnp.append(order[1:], 0), alone)
    next_rows = jnp.zeros_like(places).at[order].set(following, unique_indices=True)
    return next_rows.reshape(touched.shape)


value_scan.defvjp(_scan_forward, _scan_backward, symbolic_zeros=True)


def _is_zero(x: object) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)
