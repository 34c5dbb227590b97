"""Gradients of the row kernels: each kernel's gradient uses the other two kernels.

- read: the cotangent of the weights is a dot; that of the table is an addition to zeros.
- dot: the cotangent of the vectors is a read; that of the table is an addition to zeros.
- add: the cotangent of the table passes through; those of coefficients and rows are a dot with it
  and a read from it.

The cotangent of a table is computed only if the caller differentiates with respect to the table.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.core.slots.values.grouping import SlotGroups, group_slots
from fwpkm_jax.core.slots.write import PLAIN
from pallas_kernels.dispatch import Kernel, custom_vjp, module_of


@custom_vjp(fixed=1)
def read(
    chosen: Kernel,
    values: jax.Array,
    slot_ids: jax.Array,
    weights: jax.Array,
    target: jax.Array | None,
    write_weight: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """`slot_read`; errors are None without targets."""
    return module_of("slot_read", chosen).read(values, slot_ids, weights, target, write_weight)


@custom_vjp(fixed=1)
def dot(chosen: Kernel, values: jax.Array, slot_ids: jax.Array, vectors: jax.Array) -> jax.Array:
    """`slot_dot`."""
    return module_of("slot_read", chosen).dot(values, slot_ids, vectors)


def _read_forward(chosen, values, slot_ids, weights, target, write_weight):
    asked = _asked(values)
    arrays = jax.tree.map(lambda x: x.value, (values, slot_ids, weights, target, write_weight))
    output, errors = read(chosen, *arrays)
    kept = None if errors is None else (arrays[3], arrays[4], output)
    return (output, errors), (*arrays[:3], kept, asked)


def _read_backward(chosen, residuals, cotangents):
    values, slot_ids, weights, kept, asked = residuals
    output_bar, errors_bar = cotangents
    vectors = _instantiated(output_bar)
    target_bar = write_weight_bar = None
    if kept is not None:
        target, write_weight, output = kept
        _, of_error = jax.vjp(PLAIN.error, output, target, write_weight[:, None])
        read_bar, target_bar, write_weight_bar = of_error(_instantiated(errors_bar))
        write_weight_bar = write_weight_bar[:, 0]
        vectors = vectors + read_bar
    weights_bar = dot(chosen, values, slot_ids, vectors)
    values_bar = None
    if asked is not None:
        values_bar = _table_cotangent(chosen, values, slot_ids, weights, vectors)
    return values_bar, None, weights_bar, target_bar, write_weight_bar


def _dot_forward(chosen, values, slot_ids, vectors):
    asked = _asked(values)
    arrays = values.value, slot_ids.value, vectors.value
    return dot(chosen, *arrays), (*arrays, asked)


def _dot_backward(chosen, residuals, dot_bar):
    values, slot_ids, vectors, asked = residuals
    dot_bar = _instantiated(dot_bar)
    vectors_bar, _ = read(chosen, values, slot_ids, dot_bar, None, None)
    values_bar = None
    if asked is not None:
        values_bar = _table_cotangent(chosen, values, slot_ids, dot_bar, vectors)
    return values_bar, None, vectors_bar


read.defvjp(_read_forward, _read_backward, symbolic_zeros=True)
dot.defvjp(_dot_forward, _dot_backward, symbolic_zeros=True)


@custom_vjp(fixed=2)
def add(
    chosen: Kernel,
    with_old_rows: bool,
    values: jax.Array,
    groups: SlotGroups,
    coefficients: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """`slot_add`'s table, and the changed rows before the addition or None."""
    return module_of("slot_add", chosen).add(
        values, groups, coefficients, rows, with_old_rows=with_old_rows
    )


def _add_forward(chosen, with_old_rows, values, groups, coefficients, rows):
    outputs = add(chosen, with_old_rows, values, groups, coefficients, rows)
    return outputs, (groups, coefficients, rows)


def _add_backward(chosen, with_old_rows, residuals, cotangents):
    groups, coefficients, rows = residuals
    # An addition passes the table's cotangent on, so no copy of it is made.
    table_bar, old_rows_bar = cotangents
    slot_ids = groups.slots[groups.rank]
    coefficients_bar = dot(chosen, table_bar, slot_ids, rows)
    rows_bar, _ = read(chosen, table_bar, slot_ids, coefficients, None, None)
    if with_old_rows:
        # The old rows are a copy of the table's: their cotangents return to the slots they left.
        table_bar = table_bar.at[groups.slots].add(
            old_rows_bar, mode="drop", unique_indices=True, indices_are_sorted=True
        )
    return table_bar, None, coefficients_bar, rows_bar


add.defvjp(_add_forward, _add_backward)


def _asked(primal: jax.custom_derivatives.CustomVJPPrimal) -> tuple[()] | None:
    """() if the caller differentiates with respect to an argument, else None.

    `()` has no leaves, so tracing keeps it as it is; a bool would become an array.
    """
    return () if primal.perturbed else None


def _instantiated(cotangent: Any) -> jax.Array:
    """The cotangent as an array; zeros if the loss does not depend on the output."""
    if isinstance(cotangent, jax.Array):
        return cotangent
    return jnp.zeros(cotangent.shape, cotangent.dtype)


def _table_cotangent(chosen, values, slot_ids, weights, vectors):
    groups = group_slots(slot_ids, num_slots=values.shape[0])
    table = jnp.zeros(values.shape, jnp.float32)
    return add(chosen, False, table, groups, weights, vectors)[0].astype(values.dtype)
