"""GPU (Hopper): one kernel computes all parts of the convolution, and one all of its cotangents.

Each reads the projection in place, at the columns of a part, and computes in float32. The forward
kernel keeps nothing for the backward pass, which computes the convolution again.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import launch_grid
from pallas_kernels.short_convolution.arguments import EPS, Arrays, Part, parts_of
from pallas_kernels.short_convolution.gpu_back import backward as backward
from pallas_kernels.short_convolution.gpu_program import (
    COMPILER,
    IN_FLIGHT,
    Block,
    activated,
    for_each_block,
    grid_of,
    inputs_before_tile,
    load,
    over_columns,
    pipelined,
    plan,
    rows_of,
    tile_of,
    visible,
    weighted_sum,
)


def length_step() -> int:
    """The length must be a multiple of this, which both kernels' tiles divide."""
    return max(tile_of("forward"), tile_of("backward"))


def forward(
    x: jax.Array,
    before: jax.Array,
    weight: jax.Array,
    seen: jax.Array | None,
    *,
    parts: Sequence[Part],
    dtype: Any,
    save: bool,
) -> tuple[tuple[jax.Array, ...], Arrays]:
    """The result of each part, `[batch, length, groups * width]`, and what `backward` reads.

    Args:
      x, before, weight, seen: see `Arrays`.
      parts: what the columns become.
      dtype: of the results that have taps.
      save: changes nothing, see `dispatch.run_kernels`.
    """
    batch, length, groups, _ = x.shape
    found = plan(groups, parts)
    assert not isinstance(found, str), found
    blocks = [block for block in found.blocks if block.part.convolved]
    tile = tile_of("forward")
    taps = len(weight)
    arrays = {
        "x": x.reshape(batch, length, found.rows, -1),
        "before": [rows_of(before, block) for block in blocks],
        "weight": [rows_of(weight, block) for block in blocks],
        "seen": seen,
    }
    leaves, structure = jax.tree.flatten(arrays)

    def kernel(*refs: Any) -> None:
        given = jax.tree.unflatten(structure, refs[: len(leaves)])
        results = refs[len(leaves) :]
        sequence, first = jax.lax.axis_index("batch"), jax.lax.axis_index("tile") * tile

        def of_block(number: int, block: Block, row: Any) -> None:
            mine = pl.ds(row, block.rows_here)
            there = pl.ds(block.first + row, block.rows_here), pl.ds(block.column, block.width)
            tap = [load(given["weight"][number].at[j, mine], block) for j in range(taps)]
            # A sliding window of inputs in registers: each is loaded once in a tile.
            recent = inputs_before_tile(
                given["x"].at[sequence, :, *there], given["before"][number].at[sequence, :, mine],
                first, block,
            )  # fmt: skip
            together = IN_FLIGHT["forward"] // block.vector

            def fetch(i: Any) -> Any:
                # Groups behind the end read the last token again, and are not used.
                tokens = [
                    jnp.minimum(first + i * together + j, length - 1) for j in range(together)
                ]
                loaded = [load(given["x"].at[sequence, token, *there], block) for token in tokens]
                sees = [None if seen is None else given["seen"][sequence, t] for t in tokens]
                return list(zip(loaded, sees, strict=True))

            def use(i: Any, loaded: Any, recent: Any) -> Any:
                for j, (new, sees) in enumerate(loaded):
                    inputs = [*recent, new.astype(jnp.float32)]
                    y, _ = activated(weighted_sum(tap, visible(inputs, sees)))
                    if block.part.head is not None:
                        scale = jax.lax.rsqrt(jnp.sum(y * y, axis=1) + EPS)
                        y = y * over_columns(scale, block)
                    token = first + i * together + j
                    results[number].at[sequence, token, mine][...] = y.astype(dtype)
                    recent = inputs[1:]
                return recent

            pipelined(tile // together, fetch, use, recent)

        for_each_block(blocks, of_block)

    shapes = [(batch, length, block.rows, block.width) for block in blocks]
    made = launch_grid(
        kernel,
        *leaves,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        grid=grid_of(blocks, tiles=length // tile, batch=batch),
        name="short_convolution",
        compiler=COMPILER,
    )
    results = iter(y.reshape(batch, length, -1) for y in made)
    whole = zip(parts_of(x, parts), parts, strict=True)
    results = tuple(next(results) if part.convolved else y for y, part in whole)
    return results, Arrays(x, before, weight, seen)
