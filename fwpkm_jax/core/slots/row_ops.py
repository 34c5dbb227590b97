"""Rows of a table read, multiplied and added to, without a copy per reference.

`core.slots.value_scan` is built from these operations; kernels can replace them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import (
    SlotIds,
    SlotWeights,
    TokenValues,
    ValueTable,
)
from fwpkm_jax.core.slots.grouping import SlotGroups

# Tokens whose rows a CPU forms at once; the rows of a whole chunk would need new pages of memory.
_BLOCK = 64

_Tree = TypeVar("_Tree")


def read_rows(values: ValueTable, slot_ids: SlotIds, weights: SlotWeights) -> TokenValues:
    """Weighted sums of rows, one per token: as `table.slot_read`, without a backward pass."""
    return jax.lax.platform_dependent(
        values, slot_ids, weights, cpu=read_by_blocks, default=_read_by_places
    )


def dot_rows(values: ValueTable, slot_ids: SlotIds, vectors: TokenValues) -> SlotWeights:
    """Inner products of each token's vector with the rows it reads."""
    return jax.lax.platform_dependent(
        values, slot_ids, vectors, cpu=dot_by_blocks, default=_dot_at_once
    )


def pull_rows(
    values: ValueTable, slot_ids: SlotIds, weights: SlotWeights, vectors: TokenValues
) -> tuple[TokenValues, SlotWeights]:
    """`read_rows` and `dot_rows` of the same rows."""
    return jax.lax.platform_dependent(
        *(values, slot_ids, weights, vectors), cpu=_pull_by_blocks, default=_pull_in_turn
    )


def _read_by_places(values, slot_ids, weights):
    """One place at a time, so that gather and sum fuse and no copy of the rows is stored."""
    total = jnp.zeros((slot_ids.shape[0], values.shape[1]), values.dtype)
    for place in range(slot_ids.shape[1]):
        rows = values.at[slot_ids[:, place]].get(mode="promise_in_bounds")
        total = total + weights[:, place, None] * rows
    return total


def _dot_at_once(values, slot_ids, vectors):
    rows = values.at[slot_ids].get(mode="promise_in_bounds")
    return _dot(rows, vectors)


def _pull_in_turn(values, slot_ids, weights, vectors):
    return _read_by_places(values, slot_ids, weights), _dot_at_once(values, slot_ids, vectors)


def read_by_blocks(values: ValueTable, slot_ids: SlotIds, weights: SlotWeights) -> TokenValues:
    """`read_rows` as a CPU does it."""
    return _by_blocks(values, slot_ids, _sum, weights)


def dot_by_blocks(values: ValueTable, slot_ids: SlotIds, vectors: TokenValues) -> SlotWeights:
    """`dot_rows` as a CPU does it."""
    return _by_blocks(values, slot_ids, _dot, vectors)


def _pull_by_blocks(values, slot_ids, weights, vectors):
    return _by_blocks(
        *(values, slot_ids, lambda rows, w, v: (_sum(rows, w), _dot(rows, v)), weights, vectors)
    )


def _by_blocks(values, slot_ids, function, *arguments):
    """`function(rows [tokens, places, value], *arguments)` of a few tokens at a time."""

    def of_token(token):
        rows = values.at[token[0][None]].get(mode="promise_in_bounds")
        return jax.tree.map(lambda x: x[0], function(rows, *(x[None] for x in token[1:])))

    return jax.lax.map(of_token, (slot_ids, *arguments), batch_size=_BLOCK)


def _sum(rows: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.einsum("tpv,tp->tv", rows, weights, precision=jax.lax.Precision.HIGHEST)


def _dot(rows: jax.Array, vectors: jax.Array) -> jax.Array:
    return jnp.einsum("tpv,tv->tp", rows, vectors, precision=jax.lax.Precision.HIGHEST)


def add_rows(
    values: ValueTable, groups: SlotGroups, coefficients: SlotWeights, rows: TokenValues
) -> ValueTable:
    """Adds a multiple of each token's row to the rows of the table that it reads.

        V[i] += sum of coefficients[t, p] * rows[t] over the places (t, p) that read slot i

    In place in a loop. The sum's order is fixed: a CPU adds one reference after the other; other
    devices sum sorted runs first, so that no two additions meet in one row.
    """
    return jax.lax.platform_dependent(
        values, groups, coefficients, rows, cpu=_add_in_turn, default=_add_by_runs
    )


def _add_in_turn(
    values: ValueTable, groups: SlotGroups, coefficients: SlotWeights, rows: TokenValues
) -> ValueTable:
    return add_by_blocks(values, groups.slots[groups.rank], coefficients, rows)


def add_by_blocks(
    values: ValueTable, slot_ids: SlotIds, coefficients: SlotWeights, rows: TokenValues
) -> ValueTable:
    """`add_rows` as a CPU does it."""
    blocks, rest = divmod(rows.shape[0], _BLOCK)
    everything = (slot_ids, coefficients, rows)

    def add(values: ValueTable, start: jax.Array | int, length: int) -> ValueTable:
        slot_ids, coefficients, rows = (
            jax.lax.dynamic_slice_in_dim(x, start, length) for x in everything
        )
        added = coefficients[:, :, None] * rows[:, None, :]
        return values.at[slot_ids].add(added, mode="promise_in_bounds")

    if blocks:
        values = jax.lax.fori_loop(0, blocks, lambda i, v: add(v, i * _BLOCK, _BLOCK), values)
    return add(values, blocks * _BLOCK, rest) if rest else values


def _add_by_runs(
    values: ValueTable, groups: SlotGroups, coefficients: SlotWeights, rows: TokenValues
) -> ValueTable:
    places = groups.rank.shape[1]
    sorted_rows = coefficients.reshape(-1)[groups.order, None] * rows[groups.order // places]
    group = groups.rank.reshape(-1)[groups.order]

    def merge(left, right):
        (left_group, left_sum), (right_group, right_sum) = left, right
        carried = jnp.where((left_group == right_group)[:, None], left_sum, 0.0)
        return right_group, carried + right_sum

    _, sums = jax.lax.associative_scan(merge, (group, sorted_rows))
    last = jnp.maximum(groups.starts[1:] - 1, 0)
    return values.at[groups.slots].add(
        sums[last], mode="drop", unique_indices=True, indices_are_sorted=True
    )


SumReads = Callable[[jax.Array], jax.Array]
"""Sums partial reads over devices that each hold some of the slots."""


def complete_already(reads: jax.Array) -> jax.Array:
    """`SumReads` of a device that holds all slots."""
    return reads


class ChunkRows(NamedTuple):
    """What a chunk reads and writes; of a sequence, leaves `[chunks, ...]`.

    Attributes:
      weights: read weights w, `[tokens, places]`.
      steps: the write's coefficients s, minus the step size over the slot's count times w.
      targets: v, `[tokens, value]`.
      error_weights: m, `[tokens]`; a token with 0 writes nothing.
    """

    weights: Float[Array, "*chunks tokens places"]
    steps: Float[Array, "*chunks tokens places"]
    targets: Float[Array, "*chunks tokens value"]
    error_weights: Float[Array, "*chunks tokens"]


def new_log(rows: int, values: ValueTable) -> Float[Array, "logged value"]:
    """A log of as many rows of such a table. The last row is zero, others may hold anything."""
    return jnp.zeros((rows, values.shape[1]), values.dtype)


def groups_alone(groups: SlotGroups, coefficients: jax.Array, source: jax.Array) -> SlotGroups:
    """What the exchanges of a loop get as its groups, made before the loop.

    Args:
      groups: of all chunks.
      coefficients: what each reference is multiplied by where the exchanges add rows,
        `[chunks, tokens, places]`.
      source: the row that the sum of each distinct slot is added to, `[chunks, slots]`.
    """
    del coefficients, source
    return groups


def of_chunk(chunk: Int[Array, ""], chunks: _Tree) -> _Tree:
    """One chunk of leaves `[chunks, ...]`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, chunk, keepdims=False), chunks)


def logged_rows(num_slots: int, groups: SlotGroups) -> int:
    """Rows that a chunk may touch, and that the log holds for it; groups of one or all chunks."""
    return min(groups.slots.shape[-1], num_slots)


class Exchange(NamedTuple):
    """What one chunk reads and leaves.

    Attributes:
      values: the table after the write, `[slots, value]`.
      log: given to the exchange, with the touched rows before the write in the chunk's part, by
        their number in `SlotGroups`.
      output: what each token read, `[tokens, value]`.
      errors: each token writes multiples of its error, `[tokens, value]`.
    """

    values: ValueTable
    log: Float[Array, "logged value"]
    output: TokenValues
    errors: TokenValues


def exchange_rows(
    values: ValueTable,
    log: Float[Array, "logged value"],
    chunk: Int[Array, ""],
    slot_ids: Int[Array, "chunks tokens places"],
    groups: SlotGroups,
    rows: ChunkRows,
    *,
    sum_reads: SumReads = complete_already,
) -> Exchange:
    """Reads, compares and writes one chunk; see `core.slots.value_scan` for the formulas.

    The tokens read the logged rows, so each row is fetched from the table once. The write waits for
    every read of the old table; otherwise XLA would copy the table.

    Args:
      values: the table before the write.
      log: of all chunks, `[chunks * logged_rows + 1, value]`.
      chunk: which of the chunks.
      slot_ids: of all chunks, as the other arguments: a kernel reads its part where it lies.
      groups: leaves `[chunks, ...]`.
      rows: likewise.
      sum_reads: sums partial reads over devices.
    """
    del slot_ids
    distinct = logged_rows(values.shape[0], groups)
    groups, rows = of_chunk(chunk, (groups, rows))
    before = values.at[groups.slots[:distinct]].get(mode="clip")
    output = sum_reads(read_rows(before, groups.rank, rows.weights))
    errors = rows.error_weights[:, None] * (output - rows.targets)
    log = jax.lax.dynamic_update_slice_in_dim(log, before, chunk * distinct, axis=0)
    return Exchange(add_rows(values, groups, rows.steps, errors), log, output, errors)


class ExchangeBack(NamedTuple):
    """What an exchange sends back.

    Attributes:
      kept: given, with the cotangents of the touched rows in the chunk's part.
      rows: the cotangents of what the chunk read and wrote.
    """

    kept: Float[Array, "logged value"]
    rows: ChunkRows


Pull = Callable[..., tuple[TokenValues, SlotWeights]]
Dot = Callable[[ValueTable, SlotIds, TokenValues], SlotWeights]
Add = Callable[[ValueTable, SlotGroups, SlotWeights, TokenValues], ValueTable]


def exchange_back(
    kept: Float[Array, "logged value"],
    chunk: Int[Array, ""],
    later: Int[Array, "chunks distinct"],
    groups: SlotGroups,
    rows: ChunkRows,
    output: Float[Array, "chunks tokens value"],
    output_bar: Float[Array, "chunks tokens value"],
    *,
    pull: Pull = pull_rows,
    dot: Dot = dot_rows,
    add: Add = add_rows,
    sum_reads: SumReads = complete_already,
) -> ExchangeBack:
    """The cotangents of one exchange; see docs/explanation/math.md for the formulas.

    Args:
      kept: the touched rows before the writes of this and earlier chunks, and cotangents of rows.
      chunk: which of the chunks; what follows is of all of them.
      later: where the cotangent of each touched row after the write is kept.
      groups: leaves `[chunks, ...]`.
      rows: what the chunks read and wrote.
      output: what their tokens read.
      output_bar: the cotangent of `output`.
      pull: weighted sums of rows and inner products with the same rows.
      dot: inner products with rows.
      add: adds to rows.
      sum_reads: sums partial cotangents of reads over devices.
    """
    start = chunk * later.shape[1]
    everything = (later, groups, rows, output, output_bar)
    later, groups, rows, output, output_bar = of_chunk(chunk, everything)
    table_bar = kept.at[later].get(mode="promise_in_bounds")
    gap = output - rows.targets
    errors = rows.error_weights[:, None] * gap
    errors_bar, steps_bar = pull(table_bar, groups.rank, rows.steps, errors)
    targets_bar = -rows.error_weights[:, None] * errors_bar
    read_bar = sum_reads(output_bar - targets_bar)
    rows_bar = ChunkRows(
        weights=dot(kept, start + groups.rank, read_bar),
        steps=steps_bar,
        targets=targets_bar,
        error_weights=jnp.sum(errors_bar * gap, axis=-1),
    )
    # Adding zero creates a data dependency: without it XLA copies the log, in case a read comes
    # after the write.
    coefficients = rows.weights + 0.0 * (rows_bar.weights + steps_bar)
    own = groups._replace(slots=jnp.arange(groups.slots.shape[0], dtype=jnp.int32))
    table_bar = add(table_bar, own, coefficients, read_bar)
    kept = jax.lax.dynamic_update_slice_in_dim(kept, table_bar, start, axis=0)
    return ExchangeBack(kept, rows_bar)


@dataclass(frozen=True)
class RowOps:
    """The functions that read and add rows; each has the signature and meaning of its default."""

    new_log: Callable[[int, ValueTable], jax.Array] = new_log
    runs: Callable[[SlotGroups, jax.Array, jax.Array], Any] = groups_alone
    exchange: Callable[..., Exchange] = exchange_rows
    exchange_back: Callable[..., ExchangeBack] = exchange_back
    dot: Dot = dot_rows
    add: Add = add_rows
