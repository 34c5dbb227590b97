"""GPU: adds each token's query, times coefficients, to the sub-keys that it chose.

A warpgroup lays the coefficients of 64 tokens out over 64 sub-keys in registers, mostly zeros, and
multiplies them with the queries on tensor cores; no array of them exists in device memory. The
warpgroups of a program have other sub-keys and the same queries, which arrive in shared memory as
tensor cores read them, while the tile before is multiplied. The tokens of a chunk are split over
several programs, whose sums are added by whoever reads them: no two programs write to the same
place, so that two runs agree bit for bit.

As in `core.slots.keys.sums`, each float32 operand is two bfloat16 terms and a product is three. The
terms of the queries are made once for all chunks (`query_terms`): each chunk reads them as often as
it has tiles of sub-keys. Queries in bfloat16 are one term, and a product is two.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.gated_delta.gpu_tiles import Halves, put, smem_halves
from pallas_kernels.mosaic_gpu import index32, launch_grid
from pallas_kernels.product_top_k.gpu_registers import by_column, by_row, laid_out, load, matrix
from pallas_kernels.product_top_k.gpu_select import terms_of

TILE = 64
"""Tokens and sub-keys of one product."""
GROUPS = 2
"""Warpgroups per program of `add`, each with a tile of sub-keys; one where it is interpreted, as in
`product_top_k.gpu_select`."""
SPLITS = 16
"""Parts of a chunk's tokens at most; each makes sums of its own. At the paper's sizes `add` has 128
programs, for the 132 processors of an H100."""
PARTS = 32
"""The same of `totals`, which holds less: four of its programs share a processor."""
SLOTS = 2
"""Tiles of tokens in shared memory: one in use, one arriving."""


def splits_of(tokens: int) -> int:
    """Parts of as many tokens, a multiple of `TILE`."""
    tiles = tokens // TILE
    return max(parts for parts in range(1, SPLITS + 1) if tiles % parts == 0)


def query_terms(queries: jax.Array) -> Halves:
    """The bfloat16 terms of the queries of all chunks that `add` multiplies."""
    if queries.dtype == jnp.bfloat16:
        return Halves(queries)
    return Halves(*terms_of(queries, count=2))


def add(
    queries: Halves, chunk: jax.Array, ids: jax.Array, coefficients: jax.Array, *, subkeys: int
) -> tuple[jax.Array, jax.Array]:
    """Sums to each sub-key and of its coefficients, one for each part of the tokens.

    Args:
      queries: their `query_terms`, `[chunks, tokens, codebooks * half]`.
      chunk: which of the chunks, `[1]`.
      ids: the chosen sub-keys, `[chunks, codebooks, top_k, tokens]`; no one twice for a token.
      coefficients: of one or of all chunks, `[1 or chunks, codebooks, top_k, tokens]`.
      subkeys: of each codebook.

    Returns:
      `[splits, codebooks, subkeys, half]` and `[splits, codebooks, subkeys]`.
    """
    _, codebooks, top_k, tokens = ids.shape
    half = queries.hi.shape[2] // codebooks
    splits = splits_of(tokens)
    tiles = tokens // TILE // splits
    of_one = coefficients.shape[0] == 1
    groups = 1 if dispatch.interpreted() else GROUPS
    one_term = queries.lo is None

    def kernel(*refs: Any) -> None:
        terms, refs = refs[: len(queries.refs)], refs[len(queries.refs) :]
        chunk, ids, coefficients, sums, totals, laid, rows, chosen, factors, *barriers = refs
        choice_here, queries_here, used = barriers
        chunk = chunk[0]
        of_chunk = 0 if of_one else chunk
        group, codebook = jax.lax.axis_index("group"), jax.lax.axis_index("codebook")
        split, first = jax.lax.axis_index("split"), jax.lax.axis_index("tile") * groups + group
        # Rows of the laid-out tile are this group's sub-keys, columns are tokens.
        mine, sub_keys = pl.ds(first * TILE, TILE), _iota(0) + first * TILE
        laid = laid.at(group)

        def fetch(i: Any) -> None:
            slot = jax.lax.rem(i, np.int32(SLOTS))
            at, columns = pl.ds((split * tiles + i) * TILE, TILE), pl.ds(codebook * half, half)
            copies = (
                (ids.at[chunk, codebook, :, at], chosen, choice_here),
                (coefficients.at[of_chunk, codebook, :, at], factors, choice_here),
                *(
                    (term.at[chunk, at, columns], target, queries_here)
                    for term, target in zip(terms, rows.refs, strict=True)
                ),
            )
            for number, (source, target, here) in enumerate(copies):

                @pl.when(group == number % groups)  # Each group starts its share.
                def _(source=source, target=target, here=here):
                    plgpu.copy_gmem_to_smem(source, target.at[slot], here.at[slot])

        for i in range(min(SLOTS, tiles)):
            fetch(jnp.int32(i))

        def step(i: Any, total: Any, of_rows: jax.Array) -> jax.Array:
            i = index32(i)
            slot = jax.lax.rem(i, np.int32(SLOTS))

            def place_one(place: Any, placed: jax.Array) -> jax.Array:
                place = index32(place)
                one, factor = (load(x.at[slot, place], by_column()) for x in (chosen, factors))
                return _placed([one], [factor], sub_keys, placed)

            # Waits for the choice alone; the queries may still be under way.
            plgpu.barrier_wait(choice_here.at[slot])
            # A loop: all places at once would take more registers than there are.
            placed = jax.lax.fori_loop(0, top_k, place_one, _nothing())
            put(laid, placed)
            plgpu.barrier_wait(queries_here.at[slot])
            of_slot = rows.at(slot)
            for left, right in (
                # Small products first, so that the large one is not rounded by them.
                (laid.lo, of_slot.hi),
                (laid.hi, of_slot.lo),
                (laid.hi, of_slot.hi),
            ):
                if right is not None:
                    plgpu.wgmma(total, left, right)
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()  # All warps are done with both operands.

            @pl.when(i + SLOTS < tiles)
            def _():
                plgpu.barrier_arrive(used.at[slot])
                plgpu.barrier_wait(used.at[slot])  # All groups are done with this slot.
                fetch(i + SLOTS)

            return of_rows + jnp.sum(placed, axis=1)

        def accumulate(total: Any) -> tuple[jax.Array, jax.Array]:
            nothing = laid_out(jnp.zeros((TILE,), jnp.float32), by_row())
            of_rows = jax.lax.fori_loop(
                0, tiles, lambda i, of_rows: step(i, total, of_rows), nothing
            )
            return total[...], of_rows

        # The sums of all tiles of tokens stay in the tensor core's registers.
        acc = plgpu.ACC((TILE, half), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        sums[split, codebook, mine], totals[split, codebook, mine] = pl.run_scoped(accumulate, acc)

    sums, totals = launch_grid(
        kernel,
        *queries.refs,
        chunk,
        ids,
        coefficients,
        out_type=[
            jax.ShapeDtypeStruct((splits, codebooks, subkeys, half), jnp.float32),
            jax.ShapeDtypeStruct((splits, codebooks, subkeys), jnp.float32),
        ],
        scratch=[
            smem_halves(TILE, TILE, slots=groups),
            smem_halves(TILE, half, slots=SLOTS, of=jnp.bfloat16 if one_term else jnp.float32),
            plgpu.SMEM((SLOTS, top_k, TILE), jnp.int32),
            plgpu.SMEM((SLOTS, top_k, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=len(queries.refs), num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=groups, num_barriers=SLOTS),
        ],
        grid={"tile": subkeys // TILE // groups, "codebook": codebooks, "split": splits},
        num_threads=groups,
        thread_name="group",
        name="key_scan_add",
    )
    return sums, totals


def totals(
    chunk: jax.Array,
    ids: jax.Array,
    coefficients: jax.Array,
    weights: jax.Array | None = None,
    *,
    subkeys: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Sums of the coefficients by sub-key and part of the tokens.

    Args:
      chunk: which of the chunks, `[1]`.
      ids: as for `add`.
      coefficients: as for `add`; or scores, if there are weights.
      weights: `[chunks, tokens]`; the coefficients are then the softmax of a token's scores, of
        which the first is the best, times its weight.

    Returns:
      `[parts, codebooks, subkeys]`, and with weights the softmax `[codebooks, top_k, tokens]`.
    """
    _, codebooks, top_k, tokens = ids.shape
    tiles = tokens // TILE
    parts = max(n for n in range(1, PARTS + 1) if tiles % n == 0)
    tiles //= parts
    of_one, weighted = coefficients.shape[0] == 1, weights is not None

    def kernel(chunk, ids, coefficients, *refs: Any):
        out, *shares_out = refs[1:] if weighted else refs
        chunk = chunk[0]
        codebook, part = jax.lax.axis_index("codebook"), jax.lax.axis_index("part")
        tile = jax.lax.axis_index("tile")
        sub_keys = _iota(1) + tile * TILE

        def step(i: Any, total: jax.Array) -> jax.Array:
            at = pl.ds((part * tiles + index32(i)) * TILE, TILE)
            of_chunk = 0 if of_one else chunk
            chosen = [load(ids.at[chunk, codebook, p, at], by_row()) for p in range(top_k)]
            factors = [
                load(coefficients.at[of_chunk, codebook, p, at], by_row()) for p in range(top_k)
            ]
            # The softmax of a token: its best score comes first, so the others are at most 1.
            if weighted:
                shares = [jnp.exp(score - factors[0]) for score in factors]
                whole = functools.reduce(operator.add, shares)
                shares = [share / whole for share in shares]
                each = load(refs[0].at[chunk, at], by_row())
                factors = [each * share for share in shares]

                # Every tile of sub-keys computes the same shares; one writes them.
                @pl.when(tile == 0)
                def _():
                    for place, share in enumerate(shares):
                        shares_out[0][codebook, place, at] = share

            for pair in zip(chosen, factors, strict=True):
                one, factor = (jax.lax.broadcast_in_dim(x, (TILE, TILE), (0,)) for x in pair)
                total = jnp.where(one == sub_keys, total + factor, total)
            return total

        # Tokens are rows, so that a thread holds two of them and reads few numbers; sums over rows
        # need all threads, once.
        total = jax.lax.fori_loop(0, tiles, step, _nothing())
        out[part, codebook, pl.ds(tile * TILE, TILE)] = jnp.sum(total, axis=0)

    sums, *shares = launch_grid(
        kernel,
        *(x for x in (chunk, ids, coefficients, weights) if x is not None),
        out_type=[
            jax.ShapeDtypeStruct((parts, codebooks, subkeys), jnp.float32),
            *[jax.ShapeDtypeStruct((codebooks, top_k, tokens), jnp.float32)] * weighted,
        ],
        grid={"tile": subkeys // TILE, "codebook": codebooks, "part": parts},
        name="key_scan_totals",
    )
    return sums, shares[0] if shares else None


def _placed(
    chosen: Sequence[jax.Array],
    factors: Sequence[jax.Array],
    sub_keys: jax.Array,
    placed: jax.Array,
) -> jax.Array:
    """`placed` with each token's coefficients at the sub-keys that it chose."""
    for pair in zip(chosen, factors, strict=True):
        one, factor = (jax.lax.broadcast_in_dim(x, (TILE, TILE), (1,)) for x in pair)
        placed = jnp.where(one == sub_keys, factor, placed)
    return placed


def _nothing() -> jax.Array:
    """A tile of zeros."""
    return laid_out(jnp.zeros((TILE, TILE), jnp.float32), matrix())


def _iota(axis: int) -> jax.Array:
    """The number of each row or column of a tile."""
    if dispatch.interpreted():
        return jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), axis)
    return plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=matrix())
