"""Launches Mosaic GPU kernels, and moves rows in those whose programs are one warpgroup each."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch

WARPGROUP = 128
"""Threads of a warpgroup; each holds the same columns of every row."""
NO_BARRIERS = MappingProxyType({"unsafe_no_auto_barriers": True})
"""For kernels that have barriers where they need them: JAX would add two to each store to shared
memory, and one to each copy. No two threads may access the same written element between them."""
IN_FLIGHT = 8
"""Rows loaded before the first is used: 16 KiB per warpgroup at 512 float32 columns."""


def launch(
    body: Callable[..., None],
    *operands: Any,
    programs: int,
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    name: str,
) -> Any:
    """Runs `body(program, *operands, *outputs)` once per program, with refs in GPU memory.

    Operands that are `jax.Ref`s are updated in place. The body must not let two threads access the
    same written element, because there are no barriers between its loads and stores.
    """

    def kernel(*refs):
        body(jax.lax.axis_index("program"), *refs)

    # `plgpu.kernel` cannot be used: in jax 0.10 its batching wrapper does not pass refs on.
    return pl.kernel(
        kernel,
        out_type=tuple(out_type),
        mesh=plgpu.Mesh(grid=(programs,), grid_names=("program",)),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=dispatch.gpu_interpreter() or False,
        name=name,
    )(*operands)


def launch_grid(
    kernel: Callable[..., None],
    *operands: Any,
    out_type: Any,
    grid: Mapping[str, int],
    name: str,
    scratch: Sequence[Any] = (),
    compiler: Mapping[str, bool] = MappingProxyType({}),
    **threads: Any,
) -> Any:
    """Runs `kernel(*operands, *outputs, *scratch)` once per place of the grid, in one warpgroup.

    Args:
      kernel: takes refs to operands and outputs in GPU memory, then its scratch memory.
      *operands: arrays that are read.
      out_type: types of the outputs.
      grid: how many programs there are along each axis, by its name.
      name: of the kernel in profiles.
      scratch: shared memory and barriers of each program.
      compiler: parameters of the compiler; `NO_BARRIERS` where the kernel has its own.
      **threads: `num_threads` and `thread_name` of programs of several warpgroups.
    """
    # Lanes: layouts mean the same in all versions of JAX.
    params = {"lowering_semantics": plgpu.LoweringSemantics.Lane, **compiler}
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(**params),
        interpret=dispatch.gpu_interpreter(),
        **threads,
    )(*operands)


def rows_of(tokens: int, most: int) -> int:
    """Rows of a program: the largest divisor of the number of tokens that is at most `most`."""
    # Divisors only: a program with a rest would need a branch for each row.
    return max(rows for rows in range(1, most + 1) if tokens % rows == 0)


def over_tables(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel(values, slot_ids, *of_tokens)`, which under `vmap` is still one launch.

    Mosaic GPU cannot batch such a kernel. Rows are found by their number alone, so the tables of a
    batch are laid end to end, and their tokens too.

    Args:
      kernel: from a table `[slots, value]`, slots `[tokens, places]` and arrays `[tokens, ...]` or
        None to arrays `[tokens, ...]`.
    """
    call = jax.custom_batching.custom_vmap(kernel)

    @call.def_vmap
    def _(size: int, batched: Any, values: jax.Array, *of_tokens: Any) -> Any:
        values_batched, *others_batched = batched

        def stacked(x: jax.Array, is_batched: bool) -> jax.Array:
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        slot_ids, *others = jax.tree.map(stacked, list(of_tokens), others_batched)
        if values_batched:
            starts = values.shape[1] * jnp.arange(size, dtype=slot_ids.dtype)
            slot_ids = slot_ids + starts[:, None, None]
            values = values.reshape(-1, values.shape[2])
        laid = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (slot_ids, *others))
        out = call(values, *laid)
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda x: True, out)

    return call


def sequential_vmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that updates refs inside; under `vmap` it runs for one after the other.

    Mosaic GPU cannot batch refs, and each launch owns the array that it updates.
    """
    if jax.__version_info__ < (0, 11):
        _know_refs_in_batches()
    return jax.custom_batching.sequential_vmap(function)


@functools.cache
def _know_refs_in_batches() -> None:
    """Gives jax 0.10 the rule by which later versions lower refs inside `custom_vmap`."""
    # TODO: drop once jax>=0.11.
    from jax._src.custom_batching import custom_vmap_p
    from jax._src.state.discharge import discharge_state, register_discharge_rule

    @register_discharge_rule(custom_vmap_p)
    def _(in_avals: Any, out_avals: Any, *arrays: Any, call: Any, **how: Any) -> Any:
        # No ref enters or leaves: what is given back for the inputs is None.
        out = custom_vmap_p.bind(*arrays, call=discharge_state(call), **how)
        return [None] * len(in_avals), out


def row(ref: Any, index: Any) -> jax.Array:
    """Loads one row of a table from GPU memory, with 16-byte loads if its width allows."""
    return _laid_out(ref[index])


def zeros(width: int) -> jax.Array:
    """A row of float32 zeros, distributed over the threads as by `row`."""
    return _laid_out(jnp.zeros((width,), jnp.float32))


def index32(index: jax.Array) -> jax.Array:
    """A loop index as a 32-bit integer; with 64-bit types enabled it would have 64 bits."""
    return index if index.dtype == jnp.int32 else index.astype(jnp.int32)


def _laid_out(values: jax.Array) -> jax.Array:
    if dispatch.interpreted():
        return values
    width = values.shape[0]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // WARPGROUP, 4))
    return plgpu.layout_cast(values, layout)
