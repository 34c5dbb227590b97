"""Register layouts and loads into them, on a Hopper GPU or in the interpreter."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch

NOTHING = 2**31 - 1
"""Marks that no id was found; larger than every id."""


def matrix() -> Any:
    return plgpu.Layout.WGMMA


def by_row() -> Any:
    return plgpu.Layout.WGMMA.reduce(1)


def by_column() -> Any:
    return plgpu.Layout.WGMMA.reduce(0)


def laid_out(x: jax.Array, registers: Any) -> jax.Array:
    return x if dispatch.interpreted() else plgpu.layout_cast(x, registers)


def load(ref: Any, registers: Any) -> jax.Array:
    """Reads global memory into registers; the tiles are too small for coalesced loads."""
    if dispatch.interpreted():
        return ref[...]
    if jax.__version_info__ < (0, 11):  # TODO: drop once jax>=0.11.
        return plgpu.load(ref, (), layout=registers, optimized=False)  # pyright: ignore
    return plgpu.load(ref, layout=registers, optimized=False)  # pyright: ignore
