"""Mosaic GPU kernel: one warpgroup per row of logits, which stays in shared memory.

A row of 32,000 float32 logits is 128 kB. It arrives in tiles, each announced by a barrier of its
own; the maximum and the sum of exponentials are formed as tiles arrive. A second pass over shared
memory writes the gradient. A processor holds one row at a time: while one computes, others load.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.mosaic_gpu import WARPGROUP, index32, launch_grid

TILE = 32
"""Groups of 128 logits that arrive together: 16 kB."""


def row_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, *, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Losses and slopes as `core.cross_entropy.row_cross_entropy` defines them.

    The vocabulary is a multiple of 128, and a row fits the shared memory.
    """
    tokens, vocab = logits.shape
    lanes = WARPGROUP
    full, rest = divmod(vocab // lanes, TILE)
    tiles = full + (rest > 0)
    # Else XLA puts the slices of a scan over blocks and the kernel into one launch of its own kind.
    labels, weights = jax.lax.optimization_barrier((labels, weights))

    def kernel(logits, labels, weights, losses, slopes, *scratch):
        tile_refs, arrived = scratch[:-1], scratch[-1]
        whole: Any = tile_refs[0] if full else None
        last: Any = tile_refs[-1] if rest else None
        token = jax.lax.axis_index("token")

        # A row is copied whole, once; later tiles arrive while the first ones are summed.
        for tile in range(tiles):
            size, target = (TILE, whole.at[tile]) if tile < full else (rest, last)
            source = logits.at[token, pl.ds(tile * TILE, size)]
            plgpu.copy_gmem_to_smem(source, target, arrived.at[tile])
        label, weight = labels[token], weights[token]
        # A label outside the vocabulary reads inside it, and its logit is then left out.
        at_label = jnp.clip(label, 0, vocab - 1)
        label_logit = logits[token, at_label // lanes, at_label % lanes]

        def improve(x: jax.Array, maximum: jax.Array) -> tuple[jax.Array, ...]:
            """The maximum with a tile, the factor of sums so far, and the tile's exponentials."""
            new = jnp.maximum(maximum, jnp.max(x))
            return new, jnp.exp(maximum - new), jnp.exp(x - new)

        # Finite, so that a tile of -inf is no difference of infinities.
        maximum, total = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0)
        if full:

            def accumulate(tile: Any, carry: Any) -> Any:
                maximum, sums = carry
                tile = index32(tile)
                plgpu.barrier_wait(arrived.at[tile])
                maximum, factor, terms = improve(_load(whole.at[tile]), maximum)
                return maximum, factor * sums + terms

            nothing = _laid_out(jnp.zeros((TILE, lanes), jnp.float32))
            maximum, sums = jax.lax.fori_loop(0, full, accumulate, (maximum, nothing))
            # One sum across threads for all tiles, not one for each.
            total = jnp.sum(sums)
        if rest:
            plgpu.barrier_wait(arrived.at[full])
            maximum, factor, terms = improve(_load(last), maximum)
            total = factor * total + jnp.sum(terms)
        normalizer = maximum + jnp.log(total)
        losses[token] = normalizer - jnp.where(label == at_label, label_logit, 0.0)

        def write(tile: Any, size: int, source: Any) -> None:
            # The second pass over the row reads shared memory.
            probabilities = jnp.exp(_load(source) - normalizer)
            here = _places(size, lanes) == label - tile * (TILE * lanes)
            slope = weight * jnp.where(here, probabilities - 1, probabilities)
            slopes[token, pl.ds(tile * TILE, size)] = slope.astype(slopes.dtype)

        if full:

            def write_tile(tile: Any, _: None) -> None:
                tile = index32(tile)
                write(tile, TILE, whole.at[tile])

            jax.lax.fori_loop(0, full, write_tile, None)
        if rest:
            write(full, rest, last)

    losses, slopes = launch_grid(
        kernel,
        logits.reshape(tokens, -1, lanes),
        labels,
        weights,
        out_type=[
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
            jax.ShapeDtypeStruct((tokens, vocab // lanes, lanes), dtype),
        ],
        scratch=[
            *[plgpu.SMEM((full, TILE, lanes), jnp.float32)] * (full > 0),
            *[plgpu.SMEM((rest, lanes), jnp.float32)] * (rest > 0),
            plgpu.Barrier(num_barriers=tiles),
        ],
        grid={"token": tokens},
        name="cross_entropy",
        compiler={"approx_math": True},
    )
    return losses, slopes.reshape(tokens, vocab)


def _load(ref: Any) -> jax.Array:
    return _laid_out(ref[...])


def _places(size: int, lanes: int) -> jax.Array:
    """The place of each logit in its tile."""
    if dispatch.interpreted():
        return jnp.arange(size * lanes, dtype=jnp.int32).reshape(size, lanes)
    group, lane = (
        plgpu.broadcasted_iota(jnp.int32, (size, lanes), axis, layout=_strided(size, lanes))
        for axis in range(2)
    )
    return group * lanes + lane


def _laid_out(x: jax.Array) -> jax.Array:
    return x if dispatch.interpreted() else plgpu.layout_cast(x, _strided(*x.shape))


def _strided(size: int, lanes: int) -> Any:
    """Layout by which neighbouring threads hold neighbouring logits, up to 16 bytes each."""
    return plgpu.Layout.WG_STRIDED((size, lanes), vec_size=math.gcd(size, 4))
