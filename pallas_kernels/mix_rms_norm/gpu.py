"""Mosaic GPU kernels: a warpgroup holds a row of the mix in registers, over several rows.

The mix is never stored: the backward pass recomputes it from the two arrays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import NO_BARRIERS, index32, launch_grid, row, rows_of

ROWS = 8
"""Most rows of a program."""


class Saved(NamedTuple):
    """What the backward pass reads."""

    x: jax.Array
    y: jax.Array
    gate: jax.Array
    inverses: jax.Array
    """Inverse root mean squares, `[batch, length]`."""


def forward(
    x: jax.Array, y: jax.Array, gate: jax.Array, *, eps: float, dtype: DTypeLike, save: bool
) -> tuple[jax.Array, Saved]:
    """The norm `[batch, length, width]`, and what `backward` reads, for any `save`.

    Args:
      x: `[groups, chunks, sequences, chunk, width]`, as the other functions of this file have it.
      y: `[batch, length, width]`.
      gate: `[batch, length]`.
      eps, dtype: as in the public function.
      save: see `dispatch.run_kernels`.
    """
    batch, length, width = y.shape
    tokens, laid = batch * length, x.shape
    rows = rows_of(tokens, ROWS)

    def kernel(x, y, gate, normed, inverses):
        first = jax.lax.axis_index("program") * rows

        def of_row(i: Any, _: None) -> None:
            token = first + index32(i)
            share = gate[token]
            place = _place(token, laid)
            mixed = share * row(x, place) + (1.0 - share) * row(y, token)
            inverse = jax.lax.rsqrt(jnp.sum(mixed * mixed) * (1 / width) + eps)
            inverses[token] = inverse
            normed[token] = (mixed * inverse).astype(normed.dtype)

        jax.lax.fori_loop(0, rows, of_row, None)

    normed, inverses = launch_grid(
        kernel,
        x.reshape(tokens, width),
        y.reshape(tokens, width),
        gate.reshape(tokens),
        grid={"program": tokens // rows},
        compiler=NO_BARRIERS,
        out_type=[
            jax.ShapeDtypeStruct((tokens, width), dtype),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
        ],
        name="mix_rms_norm",
    )
    return normed.reshape(y.shape), Saved(x, y, gate, inverses.reshape(gate.shape))


def backward(
    saved: Saved, normed_bar: jax.Array, *, eps: float, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of `x`, `y` and `gate`, in their layouts."""
    x, y, gate, inverses = saved
    batch, length, width = y.shape
    tokens, laid = batch * length, x.shape
    rows = rows_of(tokens, ROWS)

    def kernel(x, y, gate, inverses, normed_bar, x_bar, y_bar, gate_bar):
        first = jax.lax.axis_index("program") * rows

        def of_row(i: Any, _: None) -> None:
            token = first + index32(i)
            share, inverse = gate[token], inverses[token]
            place = _place(token, laid)
            one, other = row(x, place), row(y, token)
            above = row(normed_bar, token).astype(jnp.float32)
            # The mix again, from the arrays that it is made of.
            unit = (share * one + (1.0 - share) * other) * inverse
            # Through the norm: what lies along the normalised row does not pass.
            mixed_bar = inverse * (above - unit * (jnp.sum(above * unit) * (1 / width)))
            x_bar[place] = share * mixed_bar
            y_bar[token] = (1.0 - share) * mixed_bar
            gate_bar[token] = jnp.sum((one - other) * mixed_bar)

        jax.lax.fori_loop(0, rows, of_row, None)

    like = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    x_bar, y_bar, gate_bar = launch_grid(
        kernel,
        x.reshape(tokens, width),
        y.reshape(tokens, width),
        gate.reshape(tokens),
        inverses.reshape(tokens),
        normed_bar.reshape(tokens, width),
        grid={"program": tokens // rows},
        compiler=NO_BARRIERS,
        out_type=[like, like, jax.ShapeDtypeStruct((tokens,), jnp.float32)],
        name="mix_rms_norm_back",
    )
    return x_bar.reshape(x.shape), y_bar.reshape(y.shape), gate_bar.reshape(gate.shape)


def _place(token: Any, laid: tuple[int, ...]) -> Any:
    """The row of `x`, which has the shape `laid`, that belongs to a token of the batch."""
    _, chunks, sequences, chunk_size, _ = laid
    if sequences == 1:
        return token
    length = chunks * chunk_size
    sequence, position = token // length, token % length
    group, own = sequence // sequences, sequence % sequences
    chunk, inside = position // chunk_size, position % chunk_size
    return ((group * chunks + chunk) * sequences + own) * chunk_size + inside
