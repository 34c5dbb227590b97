"""In-place additions to the rows of a table, computed by kernels or in plain JAX."""

import functools
from typing import Literal, overload

import chex
import jax
import jax.numpy as jnp

from fwpkm_jax.core.array_types import SlotWeights, TokenValues, ValueTable
from fwpkm_jax.core.slots.values.grouping import SlotGroups
from pallas_kernels.checks import assert_results_agree, refuse_rows
from pallas_kernels.dispatch import Backend, Kernel, implementation
from pallas_kernels.row_gradients import add
from pallas_kernels.slot_add import reference
from pallas_kernels.slot_add.reference import SlotAdd
from pallas_kernels.slot_add.specs import CHECK_RATIO, CHECKED, SPECS, sample


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
      backend: "auto", "reference" or "pallas".

    Returns:
      The table; with `with_old_rows` a `SlotAdd` of table and old rows.

    Raises:
      ValueError: `backend="pallas"` on a platform without a kernel.
      NotImplementedError: `backend="pallas"` with a width or dtype that the kernel does not take.
    """
    chex.assert_equal_shape([groups.rank, coefficients])
    chosen = implementation(
        "slot_add",
        backend,
        supports=functools.partial(_refuse, values, coefficients, (rows,)),
        check=check_add,
    )
    arrays = values, groups, coefficients, rows
    if chosen == "reference":
        if with_old_rows:
            return reference.slot_add_with_old_rows(*arrays)
        return reference.slot_add(*arrays)
    values, old_rows = add(chosen, with_old_rows, *arrays)
    return SlotAdd(values, old_rows) if with_old_rows else values


def _refuse(
    values: jax.Array, of_places: jax.Array, others: tuple[jax.Array, ...], kernel: Kernel
) -> str | None:
    if values.dtype == jnp.bfloat16:
        return "bfloat16 tables"  # Rounding would lose small additions.
    return refuse_rows(values, (of_places, *others), kernel)


def check_add(kernel: Kernel) -> None:
    del kernel  # It is the one of this device.
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        assert_results_agree(add_logged, sample(spec, jnp.float32), ratio=CHECK_RATIO)


def add_logged(*, groups: SlotGroups, backend: Backend, **arrays: jax.Array) -> SlotAdd:
    """`slot_add` with the old rows; the undefined rows after the last group are set to zero."""
    values, old_rows = slot_add(groups=groups, **arrays, with_old_rows=True, backend=backend)
    specified = jnp.arange(old_rows.shape[0]) < groups.num_groups
    return SlotAdd(values, jnp.where(specified[:, None], old_rows, 0.0))
