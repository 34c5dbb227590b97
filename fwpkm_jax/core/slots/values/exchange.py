"""What one chunk reads and leaves in a table of values, and its way back.

`core.slots.values.scan` is built from these operations; kernels can replace them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import (
    SlotIds,
    SlotWeights,
    TokenValues,
    ValueTable,
)
from fwpkm_jax.core.slots.values.grouping import SlotGroups
from fwpkm_jax.core.slots.values.rows import add_rows, dot_rows, read_and_dot_rows, read_rows
from fwpkm_jax.core.slots.write import ValueWrite

_Tree = TypeVar("_Tree")


SumReads = Callable[[jax.Array], jax.Array]
"""Sums partial reads over devices that each hold some of the slots."""


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
    write: ValueWrite,
    values: ValueTable,
    log: Float[Array, "logged value"],
    chunk: Int[Array, ""],
    slot_ids: Int[Array, "chunks tokens places"],
    groups: SlotGroups,
    rows: ChunkRows,
    *,
    sum_reads: SumReads | None = None,
) -> Exchange:
    """Reads, compares and writes one chunk; see `core.slots.values.scan` for the formulas.

    The tokens read the logged rows, so each row is fetched from the table once. The write waits for
    every read of the old table; otherwise XLA would copy the table.

    Args:
      values: the table before the write.
      log: of all chunks, `[chunks * logged_rows + 1, value]`.
      slot_ids: of all chunks, as the other arguments: a kernel reads its part where it lies.
      groups: leaves `[chunks, ...]`.
      rows: what the chunks read and write, leaves `[chunks, ...]`.
      sum_reads: sums partial reads over devices; None: this one holds all slots.
    """
    distinct = logged_rows(values.shape[0], groups)
    groups, rows = of_chunk(chunk, (groups, rows))
    # Clipped: entries behind the last distinct slot lie outside the table and are never read.
    before = values.at[groups.slots[:distinct]].get(mode="clip")
    output = read_rows(before, groups.rank, rows.weights)
    if sum_reads is not None:
        output = sum_reads(output)
    errors = write.error(output, rows.targets, rows.error_weights[:, None])
    log = jax.lax.dynamic_update_slice_in_dim(log, before, chunk * distinct, axis=0)
    return Exchange(add_rows(values, groups, rows.steps, errors), log, output, errors)


class ExchangeBack(NamedTuple):
    """What an exchange sends back.

    Attributes:
      log: given, with the cotangents of the touched rows in the chunk's part.
      rows: the cotangents of what the chunk read and wrote.
    """

    log: Float[Array, "logged value"]
    rows: ChunkRows


Read = Callable[[ValueTable, SlotIds, SlotWeights], TokenValues]
ReadAndDot = Callable[..., tuple[TokenValues, SlotWeights]]
Dot = Callable[[ValueTable, SlotIds, TokenValues], SlotWeights]
Add = Callable[[ValueTable, SlotGroups, SlotWeights, TokenValues], ValueTable]


class RowSums(NamedTuple):
    """The sums over rows that a way back needs, each with the meaning of its default.

    Attributes:
      read: weighted sums of rows; only where a scan has operations of its own.
      read_and_dot: weighted sums of rows and inner products with the same rows.
      dot: inner products with rows.
      add: adds to rows.
    """

    read: Read = read_rows
    read_and_dot: ReadAndDot = read_and_dot_rows
    dot: Dot = dot_rows
    add: Add = add_rows


PLAIN_SUMS = RowSums()


def exchange_back(
    write: ValueWrite,
    log: Float[Array, "logged value"],
    chunk: Int[Array, ""],
    next_rows: Int[Array, "chunks distinct"],
    groups: SlotGroups,
    rows: ChunkRows,
    output: Float[Array, "chunks tokens value"],
    output_bar: Float[Array, "chunks tokens value"],
    *,
    sums: RowSums = PLAIN_SUMS,
    sum_reads: SumReads | None = None,
) -> ExchangeBack:
    """The cotangents of one exchange; see docs/explanation/math.md for the formulas.

    Args:
      log: the touched rows before the writes of this and earlier chunks, and cotangents of rows.
      chunk: which of the chunks; what follows is of all of them.
      next_rows: where the cotangent of each touched row after the write is.
      groups: leaves `[chunks, ...]`.
      rows: what the chunks read and wrote.
      output: what their tokens read.
      output_bar: the cotangent of `output`.
      sums: what reads, multiplies and adds to rows.
      sum_reads: sums partial cotangents of reads over devices, as above.
    """
    start = chunk * next_rows.shape[1]
    next_rows, groups, rows, output, output_bar = of_chunk(
        chunk, (next_rows, groups, rows, output, output_bar)
    )
    # Cotangents of the touched rows after this write: where the next chunk left them.
    table_bar = log.at[next_rows].get(mode="promise_in_bounds")
    errors, of_error = jax.vjp(write.error, output, rows.targets, rows.error_weights[:, None])
    errors_bar, steps_bar = sums.read_and_dot(table_bar, groups.rank, rows.steps, errors)
    read_bar, targets_bar, error_weights_bar = of_error(errors_bar)
    read_bar = output_bar + read_bar
    if sum_reads is not None:
        read_bar = sum_reads(read_bar)
    rows_bar = ChunkRows(
        weights=sums.dot(log, start + groups.rank, read_bar),
        steps=steps_bar,
        targets=targets_bar,
        error_weights=error_weights_bar[:, 0],
    )
    # Adding zero creates a data dependency: without it XLA copies the log, in case a read comes
    # after the write.
    coefficients = rows.weights + 0.0 * (rows_bar.weights + steps_bar)
    # The gathered rows are a small table, whose slots are the ranks.
    own = groups._replace(slots=jnp.arange(groups.slots.shape[0], dtype=jnp.int32))
    table_bar = sums.add(table_bar, own, coefficients, read_bar)
    log = jax.lax.dynamic_update_slice_in_dim(log, table_bar, start, axis=0)
    return ExchangeBack(log, rows_bar)


@dataclass(frozen=True)
class RowOps:
    """The functions that read and add rows; each has the signature and meaning of its default.

    `batched` makes of a scan over all chunks one that `vmap` batches in a way of its own.
    `new_rows` makes `[..., value]` of which a loop writes what it reads: the last row is zero,
    others may hold anything.

    `runs` is called once before a loop over chunks, and the exchanges get its result in place of
    the groups. None: they get the groups. Its arguments, of all chunks:

    - the groups;
    - the factor of each reference where rows are added, `[chunks, tokens, places]`;
    - the row that the sum of each distinct slot is added to, `[chunks, slots]`.
    """

    batched: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda scan: scan
    new_rows: Callable[[tuple[int, ...], DTypeLike], jax.Array] = jnp.zeros
    runs: Callable[[SlotGroups, jax.Array, jax.Array], Any] | None = None
    exchange: Callable[..., Exchange] = exchange_rows
    exchange_back: Callable[..., ExchangeBack] = exchange_back
    dot: Dot = dot_rows
    add: Add = add_rows
