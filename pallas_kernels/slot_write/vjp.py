"""The kernel made differentiable: the table's cotangent passes through, the others read it."""

import importlib

import jax

from fwpkm_jax.core.slots.grouping import SlotGroups
from pallas_kernels.dispatch import Kernel
from pallas_kernels.slot_read import vjp as slot_read


def _add(
    chosen: Kernel,
    with_old_rows: bool,
    values: jax.Array,
    groups: SlotGroups,
    coefficients: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """`slot_add`'s table, and the touched rows as they were or None."""
    kernels = importlib.import_module(f"pallas_kernels.slot_write.{chosen}")
    return kernels.add(values, groups, coefficients, rows, with_old_rows=with_old_rows)


add = jax.custom_vjp(_add, nondiff_argnums=(0, 1))


def _add_forward(chosen, with_old_rows, values, groups, coefficients, rows):
    outputs = add(chosen, with_old_rows, values, groups, coefficients, rows)
    return outputs, (groups, coefficients, rows)


def _add_backward(chosen, with_old_rows, residuals, cotangents):
    groups, coefficients, rows = residuals
    table_bar, old_rows_bar = cotangents
    slot_ids = groups.slots[groups.rank]
    coefficients_bar = slot_read.dot(chosen, table_bar, slot_ids, rows)
    rows_bar, _ = slot_read.read(chosen, table_bar, slot_ids, coefficients, None, None)
    if with_old_rows:
        table_bar = table_bar.at[groups.slots].add(
            old_rows_bar, mode="drop", unique_indices=True, indices_are_sorted=True
        )
    return table_bar, None, coefficients_bar, rows_bar


add.defvjp(_add_forward, _add_backward)
