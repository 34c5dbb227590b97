"""GPU: finds the best slots among pairs of the best sub-keys, one thread per token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.mosaic_gpu import index32, launch_grid
from pallas_kernels.product_top_k import layout
from pallas_kernels.product_top_k.gpu_registers import NOTHING, load

THREADS = 128
"""Tokens per program, one per thread."""


def merge(
    sub_key_ids: jax.Array, sub_key_scores: jax.Array, *, subkeys: int
) -> tuple[jax.Array, jax.Array]:
    """Ids and scores of the best slots, `[heads, top_k, tokens]`."""
    codebooks, top_k, tokens = sub_key_ids.shape
    shape = (codebooks // 2, top_k, tokens)
    ids, scores = launch_grid(
        functools.partial(_merge_kernel, subkeys=subkeys, top_k=top_k),
        sub_key_ids,
        sub_key_scores,
        out_type=[
            jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
        ],
        grid={"tile": tokens // THREADS, "head": codebooks // 2},
        name="product_top_k_merge",
    )  # fmt: skip
    return ids, scores


def _merge_kernel(sub_key_ids, sub_key_scores, ids, scores, *, subkeys: int, top_k: int):
    head = jax.lax.axis_index("head")
    tokens = pl.ds(jax.lax.axis_index("tile") * THREADS, THREADS)

    def ranked(ref: Any, codebook: int) -> list[jax.Array]:
        one_each = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
        refs = (ref.at[2 * head + codebook, rank, tokens] for rank in range(top_k))
        return [load(ref, one_each) for ref in refs]

    rows, columns = ranked(sub_key_scores, 0), ranked(sub_key_scores, 1)
    row_ids, column_ids = ranked(sub_key_ids, 0), ranked(sub_key_ids, 1)
    # The pair of ranks i and j has i * j pairs that are no worse, so i j <= top_k.
    pairs = [(i, j) for i, count in enumerate(layout.partners(top_k)) for j in range(count)]
    slots = [row_ids[i] * subkeys + column_ids[j] for i, j in pairs]

    def take(rank: Any, sums: list[jax.Array]) -> list[jax.Array]:
        rank = index32(rank)
        best = _settled(functools.reduce(jnp.maximum, sums))
        # Among equal sums the lowest slot wins, as in plain JAX.
        candidates = (
            jnp.where(x == best, slot, NOTHING) for x, slot in zip(sums, slots, strict=True)
        )
        chosen = _settled(functools.reduce(jnp.minimum, candidates))
        ids[head, rank, tokens] = jnp.where(chosen == NOTHING, 0, chosen)
        scores[head, rank, tokens] = best
        # Slots differ between pairs, so that one pair leaves.
        return [jnp.where(slot == chosen, -jnp.inf, x) for x, slot in zip(sums, slots, strict=True)]

    jax.lax.fori_loop(0, top_k, take, [rows[i] + columns[j] for i, j in pairs])


def _settled(x: jax.Array) -> jax.Array:
    """When kernels are interpreted, keeps XLA from repeating a long reduction in each consumer."""
    return jax.lax.optimization_barrier(x) if dispatch.interpreted() else x
