"""Launches Mosaic GPU kernels in which each program is one warpgroup and moves whole rows."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch

WARPGROUP = 128
"""Threads of a warpgroup; each holds the same columns of every row."""
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


def launch_rows(kernel: Any, *operands: Any, programs: int, out_type: Any, name: str) -> Any:
    """Runs `kernel(*operands, *outputs)` once per program, whose number is the axis `program`.

    Each warpgroup holds whole rows in registers, with sums over a row. No two threads may access
    the same element of an array that is written, because there are no barriers.
    """
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(programs,),
        grid_names=("program",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=dispatch.gpu_interpreter(),
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
        del out_avals
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
