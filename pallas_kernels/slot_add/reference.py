"""The definition of `slot_add` in plain JAX."""

from typing import NamedTuple

from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import SlotWeights, TokenValues, ValueTable
from fwpkm_jax.core.slots.values.grouping import SlotGroups
from fwpkm_jax.core.slots.values.rows import add_rows


class SlotAdd(NamedTuple):
    """A table after an addition, and the changed rows before it.

    Attributes:
      values: `[slots, value]`.
      old_rows: `[references, value]`; row r is the r-th distinct slot's row before the addition.
        Rows after the last distinct slot are undefined.
    """

    values: ValueTable
    old_rows: Float[Array, "references value"]


def slot_add(
    values: ValueTable, groups: SlotGroups, coefficients: SlotWeights, rows: TokenValues
) -> ValueTable:
    return add_rows(values, groups, coefficients, rows)


def slot_add_with_old_rows(
    values: ValueTable, groups: SlotGroups, coefficients: SlotWeights, rows: TokenValues
) -> SlotAdd:
    old_rows = values.at[groups.slots].get(mode="clip")
    return SlotAdd(add_rows(values, groups, coefficients, rows), old_rows)
