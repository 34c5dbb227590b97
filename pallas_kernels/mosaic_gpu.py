"""Launches Mosaic GPU kernels in which each program is one warpgroup and moves whole rows."""

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
