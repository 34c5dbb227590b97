"""The operations on table rows that `core.slots.value_scan` uses on a GPU or TPU."""

import functools

import jax
import jax.numpy as jnp

from fwpkm_jax.core.slots.grouping import SlotGroups
from fwpkm_jax.core.slots.row_ops import Exchange, RowOps
from pallas_kernels.checks import refuse_rows
from pallas_kernels.dispatch import Backend, Kernel, implementation
from pallas_kernels.slot_add.api import check_add, slot_add
from pallas_kernels.slot_read.api import check_dot, check_read, slot_dot, slot_read


def row_ops(values: jax.Array, *, backend: Backend = "auto") -> RowOps:
    """The operations for tables like `values`: all of them kernels, or all of them plain XLA.

    Args:
      values: `[..., value]`.
      backend: "auto", "reference" or "pallas".

    Raises:
      ValueError: `backend="pallas"` on a platform without a kernel.
      NotImplementedError: `backend="pallas"` with a width or dtype that the kernels do not take.
    """
    table = values.reshape(-1, values.shape[-1])
    chosen = implementation(
        "value_scan", backend, supports=functools.partial(_refuse, table), check=check_rows
    )
    return RowOps() if chosen == "reference" else _KERNELS


def _exchange(
    values: jax.Array,
    slot_ids: jax.Array,
    groups: SlotGroups,
    *,
    weights: jax.Array,
    steps: jax.Array,
    targets: jax.Array,
    error_weights: jax.Array,
) -> Exchange:
    read = slot_read(
        *(values, slot_ids, weights), target=targets, write_weight=error_weights, backend="pallas"
    )
    assert read.errors is not None
    added = slot_add(values, groups, steps, read.errors, with_old_rows=True, backend="pallas")
    return Exchange(added.values, read.output, read.errors, added.old_rows)


def _pull(
    values: jax.Array, slot_ids: jax.Array, weights: jax.Array, vectors: jax.Array
) -> tuple[jax.Array, jax.Array]:
    read = slot_read(values, slot_ids, weights, backend="pallas")
    return read.output, slot_dot(values, slot_ids, vectors, backend="pallas")


_KERNELS = RowOps(
    exchange=_exchange,
    pull=_pull,
    dot=functools.partial(slot_dot, backend="pallas"),
    add=functools.partial(slot_add, backend="pallas"),
)


def _refuse(table: jax.Array, kernel: Kernel) -> str | None:
    if table.dtype != jnp.float32:
        return f"{table.dtype} tables"
    return refuse_rows(table, (), kernel)


def check_rows(kernel: Kernel) -> None:
    """Runs all three kernels on this device; raises if one differs from its reference."""
    for check in (check_read, check_dot, check_add):
        check(kernel)
