"""The kernels made differentiable: each one's transpose is made of the other two.

The weights' cotangent of a read is a dot, the vectors' cotangent of a dot is a read, and the
table's is an addition to zeros, made only if someone differentiates by the table.
"""

import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.core.slots.grouping import group_slots
from pallas_kernels.dispatch import Kernel


def _read(
    chosen: Kernel,
    values: jax.Array,
    slot_ids: jax.Array,
    weights: jax.Array,
    target: jax.Array | None,
    write_weight: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """`slot_read`, its errors None without targets."""
    return _kernels(chosen).read(values, slot_ids, weights, target, write_weight)


def _dot(chosen: Kernel, values: jax.Array, slot_ids: jax.Array, vectors: jax.Array) -> jax.Array:
    """`slot_dot`."""
    return _kernels(chosen).dot(values, slot_ids, vectors)


read = jax.custom_vjp(_read, nondiff_argnums=(0,))
dot = jax.custom_vjp(_dot, nondiff_argnums=(0,))


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
        errors_bar = _instantiated(errors_bar)
        target_bar = -write_weight[:, None] * errors_bar
        write_weight_bar = jnp.sum(errors_bar * (output - target), axis=-1)
        vectors = vectors - target_bar
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


def _asked(primal: jax.custom_derivatives.CustomVJPPrimal) -> tuple[()] | None:
    """Whether someone differentiates by an argument: a residual that the trace keeps, not None."""
    return () if primal.perturbed else None


def _instantiated(cotangent: Any) -> jax.Array:
    """The cotangent as an array, also where nothing depends on the output."""
    if isinstance(cotangent, jax.Array):
        return cotangent
    return jnp.zeros(cotangent.shape, cotangent.dtype)


def _table_cotangent(chosen, values, slot_ids, weights, vectors):
    from pallas_kernels.slot_write import vjp as slot_write  # Its transpose is made of these.

    groups = group_slots(slot_ids, num_slots=values.shape[0])
    table = jnp.zeros(values.shape, jnp.float32)
    return slot_write.add(chosen, False, table, groups, weights, vectors)[0].astype(values.dtype)


def _kernels(chosen: Kernel) -> ModuleType:
    """The module of one device's kernels; loaded only when chosen."""
    return importlib.import_module(f"pallas_kernels.slot_read.{chosen}")
