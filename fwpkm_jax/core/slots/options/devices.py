"""Value tables split over several devices, each holding a part: inside `jax.shard_map`.

By columns: columns do not interact (`core.slots.values.scan`), so the scan needs no communication.
Before it the devices gather all tokens' addresses and exchange targets, tokens for columns; after
it they exchange what was read, columns for tokens. By slots, for tables larger than a device: each
device reads the slots it holds for all tokens, and one sum of `[tokens, value]` per chunk, forward
and backward, completes the reads.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.slots.two_phase import WrittenValues, write_values
from fwpkm_jax.core.slots.values.exchange import RowOps, exchange_back, exchange_rows
from fwpkm_jax.core.slots.write import SlotAccess


class MemoryAxes(NamedTuple):
    """Mesh axes along which devices share each memory; without any, every device has its own.

    Attributes:
      tokens: along these each device holds other sequences of a memory.
      columns: along these each device holds other columns of the value table, all of `tokens` last.
      slots: along these each device holds other slots of it.
    """

    tokens: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()

    @property
    def target_columns(self) -> tuple[str, ...]:
        """Axes that split the columns of targets and reads outside: those without tokens."""
        return tuple(axis for axis in self.columns if axis not in self.tokens)


def write_split_values(
    values: Float[Array, "groups part_of_slots part_of_columns"],
    access: SlotAccess,
    targets: Float[Array, "groups chunks tokens columns"],
    *,
    error_weights: Float[Array, "groups chunks tokens"],
    counted: Float[Array, "groups chunks tokens"],
    axes: MemoryAxes,
    ops: RowOps,
    **options: Any,
) -> WrittenValues:
    """`two_phase.write_values` of tables that devices share.

    Args:
      values: this device's part of the tables.
      access: slots that this device's tokens read, numbered in the whole table.
      targets: what they should have read: all columns but for a split along
        `axes.target_columns`.
      error_weights: of this device's tokens, as in `write_values`.
      counted: of this device's tokens, as in `write_values`.
      axes: how the tables are shared.
      ops: what reads and adds rows; tables split by slots take plain XLA.
      **options: `write` of `write_values`.

    Returns:
      This device's part of the tables, its tokens' reads with columns as in `targets`, and the norm
      of each chunk's change of the whole table.
    """
    tokens = error_weights.shape[2]
    slot_ids, weights, error_weights, counted = (
        gather_tokens(x, axes, dim=2) for x in (*access, error_weights, counted)
    )
    run = functools.partial(write_values, error_weights=error_weights, **options)
    if axes.slots:
        # A device reads zeros for slots that others hold, and the sum over devices completes them.
        own = own_slots(slot_ids, values.shape[1], axes)
        sum_reads = functools.partial(jax.lax.psum, axis_name=axes.slots)
        out = run(
            values,
            SlotAccess(own.slot_ids, jnp.where(own.held, weights, 0.0)),
            gather_tokens(targets, axes, dim=2),
            counted=jnp.where(own.held, counted[..., None], 0.0),
            ops=RowOps(
                exchange=functools.partial(exchange_rows, sum_reads=sum_reads),
                exchange_back=functools.partial(exchange_back, sum_reads=sum_reads),
            ),
        )
        output = own_tokens(out.output, tokens, axes, dim=2)
    else:
        # Every device then has all tokens for its columns, and its part of the scan talks to no
        # other.
        targets = tokens_for_columns(targets, axes)
        out = run(values, SlotAccess(slot_ids, weights), targets, counted=counted, ops=ops)
        output = columns_for_tokens(out.output, axes)
    norm = out.update_norm
    if axes.slots or axes.columns:
        norm = jnp.sqrt(jax.lax.psum(norm**2, axes.slots or axes.columns))
    return WrittenValues(out.values, output, norm)


class OwnSlots(NamedTuple):
    """References seen from a device that holds a part of the slots.

    Attributes:
      slot_ids: the slot among those that the device holds; any of them where it does not hold it.
      held: whether it holds it.
    """

    slot_ids: Int[Array, "... places"]
    held: Bool[Array, "... places"]


def own_slots(slot_ids: Int[Array, "... places"], num_held: int, axes: MemoryAxes) -> OwnSlots:
    """The references to the `num_held` slots of this device."""
    own = slot_ids - num_held * jax.lax.axis_index(axes.slots)
    held = (own >= 0) & (own < num_held)
    # References to others' slots have no weight here; spread, they crowd no row.
    return OwnSlots(jnp.where(held, own, slot_ids % num_held), held)


def gather_tokens(x: jax.Array, axes: MemoryAxes, *, dim: int = 1) -> jax.Array:
    """An array of this device's tokens, which lie along `dim`, to that of all tokens."""
    return jax.lax.all_gather(x, axes.tokens, axis=dim, tiled=True) if axes.tokens else x


def own_tokens(x: jax.Array, size: int, axes: MemoryAxes, *, dim: int = 1) -> jax.Array:
    """What `gather_tokens` began with: `size` entries of `dim`."""
    if not axes.tokens:
        return x
    return jax.lax.dynamic_slice_in_dim(x, size * jax.lax.axis_index(axes.tokens), size, axis=dim)


def tokens_for_columns(x: Float[Array, "..."], axes: MemoryAxes) -> jax.Array:
    """`[groups, chunks, tokens, columns]` of own tokens to that of own columns, of all tokens."""
    if not axes.tokens:
        return x
    return jax.lax.all_to_all(x, axes.tokens, split_axis=3, concat_axis=2, tiled=True)


def columns_for_tokens(x: Float[Array, "..."], axes: MemoryAxes) -> jax.Array:
    """The way back of `tokens_for_columns`."""
    if not axes.tokens:
        return x
    return jax.lax.all_to_all(x, axes.tokens, split_axis=2, concat_axis=3, tiled=True)
