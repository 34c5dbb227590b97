"""Mosaic GPU kernels: a warpgroup holds a row in registers and goes over several rows.

The backward pass reads the sum and both cotangents once and adds the stream's own cotangent. Each
program sums the scale's gradient over its rows; XLA adds the programs' sums in a fixed order.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import NO_BARRIERS, index32, launch_grid, row, rows_of, zeros

ROWS_FORWARD, ROWS_BACKWARD = 8, 32
"""Most rows of a program. A program of the backward pass writes one sum of the scale's gradient."""


class Saved(NamedTuple):
    """What the backward pass reads."""

    total: jax.Array
    scale: jax.Array
    inverses: jax.Array
    """Inverse root mean squares, `[tokens]`."""
    branch: tuple[()] | None
    """() if a branch was added; a bool would become an array."""


def forward(
    x: jax.Array, branch: jax.Array | None, scale: jax.Array, *, eps: float, save: bool
) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    """The sum and its norm, `[tokens, width]`, and what `backward` reads, for any `save`."""
    tokens, width = x.shape
    with_branch = branch is not None

    def of_row(token: Any, scale: jax.Array, refs: Any) -> None:
        inputs, (normed, inverses, *totals) = refs[: 1 + with_branch], refs[1 + with_branch :]
        terms = [row(ref, token).astype(jnp.float32) for ref in inputs]
        total = functools.reduce(operator.add, terms)
        if with_branch:
            # Rounded as it is stored, so that the norm is that of the stored sum.
            rounded = total.astype(x.dtype)
            totals[0][token] = rounded
            total = rounded.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.sum(total * total) * (1 / width) + eps)
        inverses[token] = inverse
        normed[token] = (total * inverse * scale).astype(x.dtype)

    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    rows = rows_of(tokens, ROWS_FORWARD)

    def kernel(scale, *refs):
        scale = row(scale, slice(None))
        first = jax.lax.axis_index("program") * rows
        jax.lax.fori_loop(0, rows, lambda i, _: of_row(first + index32(i), scale, refs), None)

    normed, inverses, *totals = launch_grid(
        kernel,
        scale,
        x,
        *([branch] if with_branch else []),
        grid={"program": tokens // rows},
        compiler=NO_BARRIERS,
        out_type=[result, jax.ShapeDtypeStruct((tokens,), jnp.float32), *[result] * with_branch],
        name="add_rms_norm",
    )
    total = totals[0] if with_branch else x
    return (total, normed), Saved(total, scale, inverses, () if with_branch else None)


def backward(
    saved: Saved, cotangents: tuple[jax.Array, jax.Array], *, eps: float
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Cotangents of the sum's terms, `[tokens, width]`, and of the scale, `[width]`."""
    total, scale, inverses, branch = saved
    tokens, width = total.shape
    rows = rows_of(tokens, ROWS_BACKWARD)

    def kernel(scale, total, inverses, total_bar, normed_bar, x_bar, scale_bars):
        program = jax.lax.axis_index("program")
        scale = row(scale, slice(None))

        def of_row(i: Any, scale_bar: jax.Array) -> jax.Array:
            token = program * rows + index32(i)
            inverse = inverses[token]
            x, above, normed = (
                row(ref, token).astype(jnp.float32) for ref in (total, total_bar, normed_bar)
            )
            unit = x * inverse
            scaled = normed * scale
            # What lies along the normalised row does not pass the norm.
            mean = jnp.sum(scaled * unit) * (1 / width)
            x_bar[token] = (above + inverse * (scaled - unit * mean)).astype(x_bar.dtype)
            return scale_bar + normed * unit

        scale_bars[program] = jax.lax.fori_loop(0, rows, of_row, zeros(width))

    x_bar, scale_bars = launch_grid(
        kernel,
        scale,
        total,
        inverses,
        *cotangents,
        grid={"program": tokens // rows},
        compiler=NO_BARRIERS,
        out_type=[
            jax.ShapeDtypeStruct(total.shape, total.dtype),
            jax.ShapeDtypeStruct((tokens // rows, width), jnp.float32),
        ],
        name="add_rms_norm_back",
    )
    return x_bar, None if branch is None else x_bar, jnp.sum(scale_bars, axis=0)
