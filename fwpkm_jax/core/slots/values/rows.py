"""Rows of a table read, multiplied and added to, without a copy per reference."""

import functools

import jax
import jax.numpy as jnp

from fwpkm_jax.core.array_types import SlotIds, SlotWeights, TokenValues, ValueTable
from fwpkm_jax.core.platform import by_platform, platform
from fwpkm_jax.core.slots.values.grouping import SlotGroups

# Tokens whose rows a CPU forms at once; the rows of a whole chunk would need new pages of memory.
_BLOCK = 64

_FULL = jax.lax.Precision.HIGHEST
_sum = functools.partial(jnp.einsum, "tpv,tp->tv", precision=_FULL)  # Of rows, by weights.
_dot = functools.partial(jnp.einsum, "tpv,tv->tp", precision=_FULL)  # Of rows with vectors.


def read_rows(values: ValueTable, slot_ids: SlotIds, weights: SlotWeights) -> TokenValues:
    """Weighted sums of rows, one per token: as `table.slot_read`, without a backward pass."""
    return by_platform(cpu=read_by_blocks, default=_read_unrolled)(values, slot_ids, weights)


def dot_rows(values: ValueTable, slot_ids: SlotIds, vectors: TokenValues) -> SlotWeights:
    """Inner products of each token's vector with the rows it reads."""
    return by_platform(cpu=dot_by_blocks, default=_dot_at_once)(values, slot_ids, vectors)


def read_and_dot_rows(
    values: ValueTable, slot_ids: SlotIds, weights: SlotWeights, vectors: TokenValues
) -> tuple[TokenValues, SlotWeights]:
    """`read_rows` and `dot_rows` of the same rows."""
    if platform() != "cpu":
        return _read_unrolled(values, slot_ids, weights), _dot_at_once(values, slot_ids, vectors)
    return _by_blocks(
        lambda rows, weights, vectors: (_sum(rows, weights), _dot(rows, vectors)),
        *(values, slot_ids, weights, vectors),
    )


def _read_unrolled(values, slot_ids, weights):
    """One place at a time, so that gather and sum fuse and no copy of the rows is stored."""
    total = jnp.zeros((slot_ids.shape[0], values.shape[1]), values.dtype)
    for place in range(slot_ids.shape[1]):
        rows = values.at[slot_ids[:, place]].get(mode="promise_in_bounds")
        total = total + weights[:, place, None] * rows
    return total


def _dot_at_once(values, slot_ids, vectors):
    rows = values.at[slot_ids].get(mode="promise_in_bounds")
    return _dot(rows, vectors)


def _by_blocks(function, values, slot_ids, *arguments):
    """`function(rows [tokens, places, value], *arguments)` of a few tokens at a time."""

    def of_token(token):
        rows = values.at[token[0][None]].get(mode="promise_in_bounds")
        return jax.tree.map(lambda x: x[0], function(rows, *(x[None] for x in token[1:])))

    return jax.lax.map(of_token, (slot_ids, *arguments), batch_size=_BLOCK)


# `read_rows` and `dot_rows` as a CPU does them.
read_by_blocks = functools.partial(_by_blocks, _sum)
dot_by_blocks = functools.partial(_by_blocks, _dot)


def add_rows(
    values: ValueTable, groups: SlotGroups, coefficients: SlotWeights, rows: TokenValues
) -> ValueTable:
    """Adds a multiple of each token's row to the rows of the table that it reads.

        V[i] += sum of coefficients[t, p] * rows[t] over the places (t, p) that read slot i

    In place in a loop. The sum's order is fixed: a CPU adds one reference after the other; other
    devices sum sorted runs first, so that no two additions meet in one row.
    """
    if platform() == "cpu":
        return add_by_blocks(values, groups.slots[groups.rank], coefficients, rows)
    return _add_by_runs(values, groups, coefficients, rows)


def add_by_blocks(
    values: ValueTable, slot_ids: SlotIds, coefficients: SlotWeights, rows: TokenValues
) -> ValueTable:
    """`add_rows` as a CPU does it."""
    blocks, rest = divmod(rows.shape[0], _BLOCK)
    everything = (slot_ids, coefficients, rows)

    def add(values: ValueTable, start: jax.Array | int, length: int) -> ValueTable:
        block = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=length
        )
        slot_ids, coefficients, rows = map(block, everything)
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

    # The last reference of a run then holds the sum of the whole run.
    _, sums = jax.lax.associative_scan(merge, (group, sorted_rows))
    last = jnp.maximum(groups.starts[1:] - 1, 0)
    return values.at[groups.slots].add(
        sums[last], mode="drop", unique_indices=True, indices_are_sorted=True
    )
