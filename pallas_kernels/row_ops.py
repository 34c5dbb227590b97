"""The operations on table rows that `core.slots.values.scan` uses on a GPU or TPU."""

import functools
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.core.slots.values.exchange import (
    PLAIN_SUMS,
    ChunkRows,
    Exchange,
    ExchangeBack,
    RowOps,
    RowSums,
    exchange_back,
    logged_rows,
    of_chunk,
)
from fwpkm_jax.core.slots.values.grouping import SlotGroups
from fwpkm_jax.core.slots.write import ValueWrite
from pallas_kernels.dispatch import Backend, Kernel, Operation, module_of
from pallas_kernels.refusals import refusal, refuse_rows


@functools.cache
def row_sums(kernel: Kernel) -> RowSums:
    """Sums over rows by one device's kernels; the same object each time, so that traces are shared.

    They call the kernels without their gradients: the scans that use them have their own.
    """
    read, dot = (getattr(module_of("slot_read", kernel), name) for name in ("read", "dot"))
    add_with_log = module_of("slot_add", kernel).add

    def read_and_dot(
        values: jax.Array, slot_ids: jax.Array, weights: jax.Array, vectors: jax.Array
    ) -> Any:
        return read(values, slot_ids, weights, None, None)[0], dot(values, slot_ids, vectors)

    def add(values: jax.Array, groups: SlotGroups, coefficients: jax.Array, rows: jax.Array) -> Any:
        return add_with_log(values, groups, coefficients, rows, with_old_rows=False)[0]

    return RowSums(lambda *of_rows: read(*of_rows, None, None)[0], read_and_dot, dot, add)


def chosen_sums(values: Any, *, backend: Backend = "auto") -> RowSums:
    """The sums over rows of a table of this width and dtype: by kernels, or in plain XLA."""
    chosen = VALUE_SCAN.choose(backend, values, ValueWrite(step_size=1.0))
    return PLAIN_SUMS if chosen == "reference" else row_sums(typing.cast(Kernel, chosen))


@functools.cache
def row_ops(kernel: Kernel) -> RowOps:
    """The operations of one device's kernels; the same object each time, so that traces are shared.

    `VALUE_SCAN.choose(backend, values, write)` says whether they take a table and its write.
    """
    sums = row_sums(kernel)
    if kernel == "tpu":
        back = functools.partial(exchange_back, sums=sums)
        return RowOps(exchange=_exchange_on_tpu, exchange_back=back, dot=sums.dot, add=sums.add)
    # Imported here, because it is slow to import and other devices do not need it.
    from pallas_kernels.mosaic_gpu import sequential_vmap

    return RowOps(
        # Whole scans one after the other: a table is laid out once for all of its chunks.
        batched=sequential_vmap,
        new_rows=_new_rows_on_gpu,
        runs=module_of("slot_add", kernel).runs_of,
        exchange=_exchange_on_gpu,
        exchange_back=_exchange_back_on_gpu,
        dot=sums.dot,
        add=sums.add,
    )


def _new_rows_on_gpu(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """XLA would write all of it, which takes as long as to write the rows themselves."""
    from pallas_kernels.mosaic_gpu import launch, zeros

    rows, width = math.prod(shape[:-1]), shape[-1]

    def body(program, log):
        log[rows - 1 + program] = zeros(width)

    out_type = [jax.ShapeDtypeStruct((rows, width), dtype)]
    return launch(body, programs=1, out_type=out_type, name="new_log")[0].reshape(shape)


def _exchange_on_gpu(
    write: ValueWrite,
    values: jax.Array,
    log: jax.Array,
    chunk: jax.Array,
    slot_ids: jax.Array,
    runs: Any,
    rows: ChunkRows,
) -> Exchange:
    del write  # Plain, see `_refuse`.
    from pallas_kernels.slot_add.gpu import add_logged
    from pallas_kernels.slot_read.gpu import read_chunk

    weights, _, targets, error_weights = rows
    output, errors = read_chunk(values, chunk, slot_ids, weights, targets, error_weights)
    values, log = add_logged(values, log, chunk, runs, errors)
    return Exchange(values, log, output, errors)


def _exchange_back_on_gpu(
    write: ValueWrite,
    log: jax.Array,
    chunk: jax.Array,
    next_rows: jax.Array,
    runs: Any,
    rows: ChunkRows,
    output: jax.Array,
    output_bar: jax.Array,
) -> ExchangeBack:
    from pallas_kernels.slot_add.gpu import add_to_log
    from pallas_kernels.slot_read.gpu_back import back

    read_bar, rows_bar = back(log, chunk, next_rows, runs.groups.rank, rows, output, output_bar)
    # The addition needs `read_bar`, so that it waits for the reads of the rows that it replaces.
    log = add_to_log(log, chunk, runs, read_bar, distinct=next_rows.shape[1])
    return ExchangeBack(log, rows_bar)


def _exchange_on_tpu(
    write: ValueWrite,
    values: jax.Array,
    log: jax.Array,
    chunk: jax.Array,
    slot_ids: jax.Array,
    groups: SlotGroups,
    rows: ChunkRows,
) -> Exchange:
    del write  # Plain, see `_refuse`.
    from pallas_kernels.slot_add.tpu import add
    from pallas_kernels.slot_read.tpu import read

    distinct = logged_rows(values.shape[0], groups)
    slot_ids, groups, (weights, steps, targets, error_weights) = of_chunk(
        chunk, (slot_ids, groups, rows)
    )
    output, errors = read(values, slot_ids, weights, targets, error_weights)
    assert errors is not None  # Targets were given.
    values, old_rows = add(values, groups, steps, errors, with_old_rows=True)
    assert old_rows is not None
    before = old_rows[:distinct]  # A chunk may have more references than slots.
    log = jax.lax.dynamic_update_slice_in_dim(log, before, chunk * distinct, axis=0)
    return Exchange(values, log, output, errors)


def _refuses(kernel: Kernel, values: jax.Array, write: ValueWrite) -> str | None:
    found = refusal(
        (bool(write.options), f"a write with {write.options}, only the plain error"),
        (values.dtype != jnp.float32, f"{values.dtype} tables"),
    )
    return found or refuse_rows(kernel, values)


# One name for the whole scan, whose kernels lie in the folders `slot_read` and `slot_add`.
VALUE_SCAN = Operation("value_scan", _refuses, check="pallas_kernels.slot_add.specs:check_scan")
