"""GPU: the cotangents of the convolution's inputs and taps.

A program goes over the tokens in order. A token's own cotangent is complete when the last token
that sees it has come, `width - 1` later; until then its sum is in registers. So each program reads
that many tokens beyond its own, and what it would add to the tokens before its own the program
before it has added. The sums for the taps are written once per program and added by XLA.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import launch_grid
from pallas_kernels.short_convolution.arguments import EPS, Arrays, Part
from pallas_kernels.short_convolution.gpu_program import (
    COMPILER,
    IN_FLIGHT,
    Block,
    activated,
    for_each_block,
    grid_of,
    inputs_before_tile,
    laid_out,
    load,
    over_columns,
    pipelined,
    plan,
    rows_of,
    tile_of,
    visible,
    weighted_sum,
)


def backward(
    saved: Arrays, d_results: Sequence[jax.Array], *, parts: Sequence[Part], dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Cotangents of the arrays, in their dtypes.

    Args:
      saved: the arrays of `gpu.forward`.
      d_results: cotangents of the results.
      parts: as for `gpu.forward`.
      dtype: that of the cotangents.
    """
    x, before, weight, seen = saved
    batch, length, groups, _ = x.shape
    found = plan(groups, parts)
    assert not isinstance(found, str), found
    blocks = found.blocks
    tile = tile_of("backward")
    taps, reach = len(weight), len(weight) - 1
    arrays = {
        "x": x.reshape(batch, length, found.rows, -1),
        "before": [rows_of(before, b) if b.part.convolved else None for b in blocks],
        "weight": [rows_of(weight, b) if b.part.convolved else None for b in blocks],
        "seen": seen,
        "d_results": [
            y.reshape(batch, length, b.rows, b.width)
            for y, b in zip(d_results, blocks, strict=True)
        ],
    }
    leaves, structure = jax.tree.flatten(arrays)

    def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    tiles = length // tile
    made = {
        "x": shape(*arrays["x"].shape, dtype=x.dtype),
        "before": [
            shape(batch, reach, b.rows, b.width) if b.part.convolved else None for b in blocks
        ],
        "weight": [
            shape(batch, tiles, taps, b.rows, b.width) if b.part.convolved else None for b in blocks
        ],
    }
    out_leaves, out_structure = jax.tree.flatten(made)

    def kernel(*refs: Any) -> None:
        given = jax.tree.unflatten(structure, refs[: len(leaves)])
        out = jax.tree.unflatten(out_structure, refs[len(leaves) :])
        sequence, own_tile = jax.lax.axis_index("batch"), jax.lax.axis_index("tile")
        first = own_tile * tile

        def of_block(number: int, block: Block, row: Any) -> None:
            mine = pl.ds(row, block.rows_here)
            there = pl.ds(block.first + row, block.rows_here), pl.ds(block.column, block.width)
            together = IN_FLIGHT["backward"] // block.vector
            d_result = given["d_results"][number]

            def group(i: Any, ahead: int) -> list[Any]:
                """The tokens of a group, `ahead` tokens later; the last one in place of later ones,
                which are read but not used."""
                start = first + i * together + ahead
                return [jnp.minimum(start + j, length - 1) for j in range(together)]

            def bars_of(tokens: list[Any]) -> list[jax.Array]:
                return [load(d_result.at[sequence, t, mine], block) for t in tokens]

            def copy(i: Any, bars: list[jax.Array], _: None) -> None:
                for j, bar in enumerate(bars):
                    token = first + i * together + j
                    out["x"].at[sequence, token, *there][...] = bar.astype(x.dtype)

            if not block.part.convolved:
                pipelined(tile // together, lambda i: bars_of(group(i, 0)), copy, None)
                return

            def fetch(tokens: list[Any]) -> list[Any]:
                """The inputs and cotangents of some tokens, and what they see."""
                inputs = [load(given["x"].at[sequence, t, *there], block) for t in tokens]
                sees = [None if seen is None else given["seen"][sequence, t] for t in tokens]
                return list(zip(inputs, bars_of(tokens), sees, strict=True))

            tap = [load(given["weight"][number].at[j, mine], block) for j in range(taps)]

            def one(loaded, recent, partial, sums, *, whether_real=None, whether_own=None):
                """Takes a token's share in: the finished sum, and what is carried on."""
                *tiles, sees = loaded
                new, bar = (y.astype(jnp.float32) for y in tiles)
                inputs = [*recent, new]
                here = visible(inputs, sees)
                # Computed again from the inputs: the forward pass stores no sum.
                mixed = weighted_sum(tap, here)
                y, sigmoid = activated(mixed)
                if block.part.head is not None:
                    scale = over_columns(jax.lax.rsqrt(jnp.sum(y * y, axis=1) + EPS), block)
                    # Through the norm of a head: what lies along the unit vector does not pass.
                    unit = y * scale
                    along = over_columns(jnp.sum(bar * unit, axis=1), block)
                    bar = scale * (bar - unit * along)
                # d SiLU(x) / dx = sigmoid + x sigmoid (1 - sigmoid).
                bar = bar * (sigmoid + y * (1.0 - sigmoid))
                if whether_real is not None:
                    bar = jnp.where(whether_real, bar, 0.0)
                # A token before the tile counts for the taps in the program before only.
                own = bar if whether_own is None else jnp.where(whether_own, bar, 0.0)
                sums = [total + own * z for total, z in zip(sums, here, strict=True)]
                # Each seen input receives its tap's share; the oldest one's sum is complete.
                shares = visible([w * bar for w in tap], sees)
                added = [a + b for a, b in zip(partial, shares[:-1], strict=True)]
                done, *partial = [*added, shares[-1]]
                return done, (inputs[1:], partial, sums)

            nothing = laid_out(jnp.zeros((block.rows_here, block.width), jnp.float32), block)
            recent = inputs_before_tile(
                given["x"].at[sequence, :, *there], given["before"][number].at[sequence, :, mine],
                first, block,
            )  # fmt: skip
            # Inputs that later tokens see, sums of cotangents under way, sums for the taps.
            carry: Any = (recent, [nothing] * reach, [nothing] * taps)
            for i, loaded in enumerate(fetch([first + i for i in range(reach)])):
                # The first tokens' shares for the taps are the program's before, if there is one.
                done, carry = one(loaded, *carry, whether_own=own_tile == 0)

                @pl.when(own_tile == 0)
                def _(i: int = i, done: jax.Array = done):
                    out["before"][number].at[sequence, i, mine][...] = done

            def use(i: Any, loaded: Any, carry: Any) -> Any:
                for j, each in enumerate(loaded):
                    token = first + i * together + j
                    # Where groups have `reach` tokens or more, only the last ones can be too late.
                    may_end = j + reach >= together
                    real = token + reach < length if may_end else None
                    done, carry = one(each, *carry, whether_real=real)
                    out["x"].at[sequence, token, *there][...] = done.astype(x.dtype)
                return carry

            carry = pipelined(tile // together, lambda i: fetch(group(i, reach)), use, carry)
            for j, total in enumerate(carry[2]):
                out["weight"][number].at[sequence, own_tile, j, mine][...] = total

        for_each_block(blocks, of_block)

    results = launch_grid(
        kernel,
        *leaves,
        out_type=out_leaves,
        grid=grid_of(blocks, tiles=tiles, batch=batch),
        name="short_convolution_back",
        compiler=COMPILER,
    )
    out = jax.tree.unflatten(out_structure, results)

    def joined(of_blocks: list[jax.Array | None]) -> jax.Array:
        """The channels of all parts, in their order."""
        return jnp.concatenate(
            [y.reshape(*y.shape[:-2], -1) for y in of_blocks if y is not None], axis=-1
        )

    # Programs sum their own tiles; the sum over tiles is XLA's, in a fixed order.
    d_weight = [y if y is None else jnp.sum(y, axis=(0, 1)) for y in out["weight"]]
    d_before, d_weight = joined(out["before"]), joined(d_weight)
    d_x = out["x"].reshape(x.shape)
    return d_x, d_before.astype(before.dtype), d_weight.astype(weight.dtype), None
