"""Launches kernels on a TPU's SparseCores, and copies rows by index.

A SparseCore has 16 small processors, which Pallas calls subcores. Each has its own memory (0.25 MiB
or more), vectors of 8 or 16 numbers, and an engine that copies the rows at a list of indices with
one command. JAX cannot interpret such copies on a CPU. There they are emulated by loops over the
rows, and the subcores run one after the other.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from pallas_kernels import dispatch

T = TypeVar("T")

IGNORED = -1
"""An index that means that no row is copied."""


class Subcores(NamedTuple):
    """The number of subcores of a device, and of float32 numbers in a subcore's vector."""

    number: int
    lanes: int


@runtime_checkable
class Copy(Protocol):
    """A copy that runs asynchronously between `start` and `wait`."""

    def start(self) -> None: ...
    def wait(self) -> None: ...


def subcores() -> Subcores:
    """The sizes of the device that is traced for."""
    if dispatch.interpreted():
        return Subcores(number=4, lanes=8)
    info = plsc.get_sparse_core_info()
    return Subcores(info.num_cores * info.num_subcores, info.num_lanes)


def launch(
    body: Callable[..., None],
    *operands: jax.Array,
    table: jax.Array | None = None,
    out_type: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    name: str,
) -> list[jax.Array]:
    """Runs `body(subcore, *operands, *results, *scratch)` on every subcore.

    Args:
      body: takes the subcore's number, then references to operands and results in HBM.
      operands: arrays that are only read.
      table: an array that is updated in place; it is the first result.
      out_type: types of the other results.
      scratch: scratch memory of each subcore.
      name: name of the kernel in profiles.

    Under `vmap` the calls of a batch run one after the other. With a table, versions of JAX before
    0.12 refuse such batches (`NotImplementedError`).
    """
    prepare = _interpreted if dispatch.interpreted() else _compiled
    tables = [] if table is None else [table]
    run = prepare(body, len(tables), out_type, scratch, name)
    if _BATCHES_TABLES or not tables:
        run = jax.custom_batching.sequential_vmap(run)
    return list(run(*operands, *tables))


def _compiled(body, num_tables, out_type, scratch, name):
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def program(*refs):
        core, subcore = jax.lax.axis_index("core"), jax.lax.axis_index("subcore")
        body(core * mesh.num_subcores + subcore, *refs)

    kernel: Any = pl.kernel(
        program,
        out_type=out_type,
        scratch_types=scratch,
        mesh=mesh,
        # All vectors have the hardware's size. jax 0.10 needs this for loops that carry vectors.
        compiler_params=pltpu.CompilerParams(needs_layout_passes=False),
        name=name,
    )

    def run(*arrays):
        operands, tables = arrays[: len(arrays) - num_tables], arrays[len(arrays) - num_tables :]
        updated = [jax.new_ref(table) for table in tables]
        results = kernel(*operands, *updated)
        return [*(jax.freeze(table) for table in updated), *results]

    return run


def _interpreted(body, num_tables, out_type, scratch, name):
    def run(*arrays):
        num_operands = len(arrays) - num_tables

        def program(*refs):
            # The table is also an input that shares its memory with the result.
            body(pl.program_id(0), *refs[:num_operands], *refs[len(arrays) :])

        hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        tables = [jax.typeof(x) for x in arrays[num_operands:]]
        return pl.pallas_call(
            program,
            grid=(subcores().number,),
            in_specs=[hbm] * len(arrays),
            out_specs=[hbm] * (num_tables + len(out_type)),
            out_shape=[*tables, *out_type],
            scratch_shapes=scratch,
            input_output_aliases={num_operands + i: i for i in range(num_tables)},
            interpret=True,
            name=name,
        )(*arrays)

    return run


def load(source: Any, target: Any, semaphore: Any) -> Copy:
    """A copy from HBM to the subcore."""
    return pltpu.make_async_copy(source, target, semaphore)


def store(source: Any, target: Any, semaphore: Any) -> Copy:
    """A copy from the subcore to HBM; after `wait` the source may change."""
    copy: Any = pltpu.make_async_copy
    if _SOURCE_HAS_SEMAPHORE and not dispatch.interpreted():
        return copy(source, target, src_sem=semaphore)
    return copy(source, target, semaphore)


def gather(source: Any, indices: Any, target: Any, semaphore: Any) -> Copy:
    """A copy of the rows at `indices` from HBM to the subcore; `IGNORED` indices are skipped.

    The indices are in the subcore's memory; there are at most 128.
    """
    if dispatch.interpreted():
        return _RowByRow(lambda row, i: _copy_row(source, i, target, row), indices)
    return pltpu.make_async_copy(source.at[_named(indices)], target, semaphore)


def scatter(source: Any, indices: Any, target: Any, semaphore: Any) -> Copy:
    """A copy of the subcore's rows to the rows at `indices` in HBM; `IGNORED` indices are skipped.

    Indices must be distinct. After `wait` the source may change. The target is complete only when
    the kernel has ended.
    """
    if dispatch.interpreted():
        return _RowByRow(lambda row, i: _copy_row(source, row, target, i), indices)
    return pltpu.make_async_copy(source, target.at[_named(indices)], semaphore)


def take(source: Any, indices: jax.Array) -> jax.Array:
    """The numbers at `indices` of a flat array in the subcore's memory, as a vector."""
    if dispatch.interpreted():
        return source[...][indices]
    return plsc.load_gather(source, [indices])


def for_columns(width: int, lanes: int, body: Callable[[Any], None]) -> None:
    """Calls `body(columns)` for each vector of a row, in any order, possibly several at once."""
    sum_columns(width, lanes, lambda columns, carry: body(columns) or carry, ())


def sum_columns(width: int, lanes: int, body: Callable[[Any, T], T], carry: T) -> T:
    """Applies `carry = body(columns, carry)` to each vector of a row and returns the last carry."""
    if dispatch.interpreted():
        return jax.lax.fori_loop(
            0, width // lanes, lambda i, carry: body(pl.ds(i * lanes, lanes), carry), carry
        )
    loop = plsc.parallel_loop(0, width, step=lanes, unroll=2, carry=carry)
    return loop(lambda column, carry: body(pl.ds(column, lanes), carry))


# TODO: drop both once jax>=0.12, where batching rules may hold references, and a copy out of a
# subcore signals its source's semaphore.
_BATCHES_TABLES = jax.__version_info__ >= (0, 12)
_SOURCE_HAS_SEMAPHORE = "src_sem" in inspect.signature(pltpu.make_async_copy).parameters
_named = functools.partial(plsc.Indices, ignored_value=IGNORED)


class _RowByRow:
    """Emulates an indexed copy for the interpreter."""

    def __init__(self, copy_row: Callable[[Any, Any], None], indices: Any):
        self.copy_row, self.indices = copy_row, indices

    def start(self) -> None:
        @pl.loop(0, self.indices.shape[0])
        def _(row):
            index = self.indices[row]
            pl.when(index != IGNORED)(lambda: self.copy_row(row, index))

    def wait(self) -> None:
        pass


def _copy_row(source: Any, i: Any, target: Any, j: Any) -> None:
    target[pl.ds(j, 1)] = source[pl.ds(i, 1)]
