"""In-place additions to the rows of a table, computed by kernels or in plain JAX."""

from typing import Literal, NamedTuple, overload

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import SlotWeights, TokenValues, ValueTable
from fwpkm_jax.core.slots.values.grouping import SlotGroups
from fwpkm_jax.core.slots.values.rows import add_rows
from pallas_kernels.dispatch import Backend, Kernel, Operation
from pallas_kernels.refusals import refuse_rows
from pallas_kernels.row_gradients import add


class SlotAdd(NamedTuple):
    """A table after an addition, and the changed rows before it.

    Attributes:
      values: `[slots, value]`.
      old_rows: `[references, value]`; row r is the r-th distinct slot's row before the addition.
        Rows after the last distinct slot are undefined.
    """

    values: ValueTable
    old_rows: Float[Array, "references value"]


@overload
def slot_add(
    values: ValueTable,
    groups: SlotGroups,
    coefficients: SlotWeights,
    rows: TokenValues,
    *,
    with_old_rows: Literal[False] = False,
    backend: Backend = "auto",
) -> ValueTable: ...


@overload
def slot_add(
    values: ValueTable,
    groups: SlotGroups,
    coefficients: SlotWeights,
    rows: TokenValues,
    *,
    with_old_rows: Literal[True],
    backend: Backend = "auto",
) -> SlotAdd: ...


def slot_add(
    values: ValueTable,
    groups: SlotGroups,
    coefficients: SlotWeights,
    rows: TokenValues,
    *,
    with_old_rows: bool = False,
    backend: Backend = "auto",
) -> ValueTable | SlotAdd:
    """Adds multiples of each token's row to the rows of the table that it reads, in place.

        values[i] += sum of coefficients[t, p] * rows[t] over the places that read slot i

    One program (the owner) sums all references to a row, in an order that depends only on `groups`,
    so two runs agree bit for bit. Under `jit` the table is updated in place if it is donated or
    carried by a loop. The gradient with respect to `values` is the cotangent itself, not a copy.

    Args:
      values: `[slots, value]` float32; value a multiple of 128.
      groups: the slots that tokens read, from `group_slots`.
      coefficients: `[tokens, places]` float32.
      rows: `[tokens, value]` float32.
      with_old_rows: True also returns the changed rows before the addition.
      backend: as of `dispatch.Operation.choose`, errors included.

    Returns:
      The table; with `with_old_rows` a `SlotAdd` of table and old rows.
    """
    chex.assert_equal_shape([groups.rank, coefficients])
    chosen = SLOT_ADD.choose(backend, values, coefficients, rows)
    if chosen == "reference":
        old_rows = values.at[groups.slots].get(mode="clip") if with_old_rows else None
        values = add_rows(values, groups, coefficients, rows)
    else:
        values, old_rows = add(chosen, with_old_rows, values, groups, coefficients, rows)
    return values if old_rows is None else SlotAdd(values, old_rows)


def _refuses(kernel: Kernel, values: jax.Array, *others: jax.Array) -> str | None:
    if values.dtype == jnp.bfloat16:
        return "bfloat16 tables"  # Rounding would lose small additions.
    return refuse_rows(kernel, values, *others)


SLOT_ADD = Operation("slot_add", _refuses)
