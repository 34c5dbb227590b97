"""GPU: finds each query's best sub-keys; a program processes 64 tokens and one codebook.

A program has two warpgroups, each with every other tile of 64 sub-keys: while one selects, tensor
cores can score for the other. A warpgroup selects the best of a tile and of its best so far, in
registers. At the end the first selects from both warpgroups' best.

wgmma has no float32 products. Each float32 operand is therefore a sum of three bfloat16 terms, and
a product is the sum of the six largest of their nine products in a float32 accumulator. The other
three are below 2^-24 of the operands, which is float32's rounding. With two terms the error would
be 2^-16 of the operands, which is some percent of a small distance between large vectors. Queries
in bfloat16 are one term, and a product is three.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fwpkm_jax.core.slots.keys.addressing import IDW_EPSILON, Score
from pallas_kernels import dispatch
from pallas_kernels.mosaic_gpu import index32, launch_grid
from pallas_kernels.product_top_k.gpu_registers import (
    NOTHING,
    by_column,
    by_row,
    laid_out,
    load,
    matrix,
)

GROUPS = 2
"""Warpgroups per program."""
INTERPRETED_GROUPS = 1
"""The same in JAX's interpreter. It runs each warpgroup in a thread of XLA's pool, as it does the
program around the kernel; where a pool has two threads, two warpgroups wait for ever."""
TOKENS, SUBKEYS, WIDTH = 64, 128, 64
"""Tokens per program, sub-keys that it scores at once, columns that are multiplied at once."""
_NAME = "product_top_k_select"
_SLOTS = 2  # Tiles of keys in shared memory per warpgroup: one in use, one arriving.
_PRODUCTS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))
"""Terms of query and key to multiply, smallest products first."""


def select(
    queries: jax.Array, keys: jax.Array, *, subkeys: int, top_k: int, score: Score
) -> tuple[jax.Array, jax.Array]:
    """Ids and scores of the best sub-keys, `[codebooks, top_k, tokens]`."""
    tokens = queries.shape[0]
    codebooks, padded_subkeys, _ = keys.shape
    offsets = jnp.sum(keys**2, axis=-1) if score == "idw" else jnp.zeros(keys.shape[:2])
    if padded_subkeys > subkeys:
        # Padded sub-keys get an infinite distance, or a product of minus infinity.
        real = jnp.arange(padded_subkeys)[None] < subkeys
        offsets = jnp.where(real, offsets, jnp.inf if score == "idw" else -jnp.inf)
    shape = (1, codebooks, top_k, tokens)
    ids, scores = _launch(
        queries[None], jnp.zeros((1,), jnp.int32), *key_terms(terms_of(keys)), offsets,
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
        ),
        top_k=top_k,
        score=score,
    )  # fmt: skip
    return ids[0], scores[0]


def select_chunk(
    queries: jax.Array,
    chunk: jax.Array,
    terms: Sequence[jax.Array],
    offsets: jax.Array,
    ids: Any,
    scores: Any,
    *,
    score: Score,
) -> None:
    """`select` of one of many chunks, read and written where it lies; sizes fit the tiles.

    Args:
      queries: `[chunks, tokens, columns]`, float32 or bfloat16.
      chunk: which of the chunks, `[1]`.
      terms: of the keys, see `terms_of`.
      offsets: the keys' squared norms for `idw`, zeros for `dot`, `[codebooks, subkeys]`.
      ids: ref of the results of all chunks, `[chunks, codebooks, top_k, tokens]`.
      scores: ref of their scores, like `ids`.
    """
    operands = (queries, chunk, *key_terms(terms), offsets, ids, scores)
    _launch(*operands, out_type=(), top_k=ids.shape[2], score=score)


def _launch(*operands: Any, out_type: Any, top_k: int, score: Score) -> Any:
    """Runs the kernel on operands as `_select_kernel` unpacks them; without `out_type` on refs."""
    queries, chunk, high, *_ = operands
    del chunk
    columns, half = queries.shape[2], _key_tile(*high.shape[1:])[1]
    groups = INTERPRETED_GROUPS if dispatch.interpreted() else GROUPS
    num_terms = 1 if queries.dtype == jnp.bfloat16 else 3

    def kernel(*refs: Any) -> None:
        pl.run_scoped(
            functools.partial(_select_kernel, refs, groups=groups, top_k=top_k, score=score),
            tuple(_operand(TOKENS, WIDTH, slots=half // WIDTH) for _ in range(num_terms)),
            plgpu.Barrier(num_arrivals=groups, num_barriers=3),
            collective_axes="group",
        )

    grid = {"tile": queries.shape[1] // TOKENS, "codebook": columns // half}
    threads: Any = {"num_threads": groups, "thread_name": "group"}
    if out_type:
        how: Any = {"out_type": out_type, "grid": grid, "name": _NAME}
        return launch_grid(kernel, *operands, **how, **threads)
    # `plgpu.kernel` can be batched, but does not pass refs on in jax 0.10.
    return pl.kernel(
        kernel,
        mesh=plgpu.Mesh(grid=(*grid.values(),), grid_names=(*grid,), **threads),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=dispatch.gpu_interpreter() or False,
        name=_NAME,
    )(*operands)


def _select_kernel(
    refs: Any, query_tiles: Any, all_here: Any, *, groups: int, top_k: int, score: Score
) -> None:
    queries, chunk, *keys, offsets, ids, scores = refs
    chunk = chunk[0]
    group, codebook = jax.lax.axis_index("group"), jax.lax.axis_index("codebook")
    tokens = pl.ds(jax.lax.axis_index("tile") * TOKENS, TOKENS)
    padded_subkeys, half = _key_tile(*keys[0].shape[1:])
    widths, tile_size = half // WIDTH, SUBKEYS // groups
    split, scored, exchanged = (all_here.at[i] for i in range(3))

    def emit(rank: Any, chosen: jax.Array, top: jax.Array) -> None:
        # NaN is not equal to any score; then use sub-key 0, so that ids stay in the codebook.
        ids[chunk, codebook, rank, tokens] = jnp.where(chosen == NOTHING, 0, chosen)
        scores[chunk, codebook, rank, tokens] = top

    def of_group(key_tiles: Any, arrived: Any) -> tuple[jax.Array, jax.Array]:
        def place(step: Any) -> Any:
            return group * _SLOTS + jax.lax.rem(step, np.int32(_SLOTS))

        # Warpgroups take turns at the tiles of sub-keys.
        def first_of(tile: Any) -> Any:
            return (tile * groups + group) * tile_size

        def fetch(step: Any) -> None:
            columns = pl.ds(jax.lax.rem(step, np.int32(widths)) * WIDTH, WIDTH)
            chosen = pl.ds(first_of(jax.lax.div(step, np.int32(widths))), tile_size)
            for source, tile in zip(keys, key_tiles, strict=True):
                source = source.at[(codebook, *_key_tile(chosen, columns))]
                plgpu.copy_gmem_to_smem(source, tile.at[place(step)], arrived.at[place(step)])

        tiles = padded_subkeys // SUBKEYS
        for step in range(min(_SLOTS, widths * tiles)):
            fetch(jnp.int32(step))
        # The queries are split into bfloat16 terms once, by the groups in turn.
        query_norms = laid_out(jnp.zeros((TOKENS,), jnp.float32), by_row())
        for width in range(widths):
            query = load(
                queries.at[chunk, tokens, pl.ds(codebook * half + width * WIDTH, WIDTH)], matrix()
            ).astype(jnp.float32)
            query_norms += jnp.sum(query * query, axis=1)

            @pl.when(group == width % groups)
            def _(query=query, width=width):
                for tile in query_tiles:
                    term = query.astype(jnp.bfloat16)
                    tile[width] = term
                    query -= term.astype(jnp.float32)

        plgpu.commit_smem()
        plgpu.barrier_arrive(split)
        plgpu.barrier_wait(split)

        def score_tile(tile: Any, total: Any) -> jax.Array:
            def multiply(width: Any, _: None) -> None:
                width = index32(width)
                step = tile * widths + width
                plgpu.barrier_wait(arrived.at[place(step)])
                for q, k in (pair for pair in _PRODUCTS if pair[0] < len(query_tiles)):
                    key = key_tiles[k].at[place(step)]
                    key = key if _by_columns() else key.transpose((1, 0))
                    plgpu.wgmma(total, query_tiles[q].at[width], key)
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()  # All warps have read this slot.
                pl.when(step + _SLOTS < widths * tiles)(lambda: fetch(step + _SLOTS))

            # A loop: unrolled, the addresses of all operands would take registers that spill.
            jax.lax.fori_loop(0, widths, multiply, None)
            return total[...]

        def improve(tile: Any, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            tile = index32(tile)
            products = pl.run_scoped(
                functools.partial(score_tile, tile),
                plgpu.ACC((TOKENS, tile_size), jnp.float32),  # pyright: ignore[reportPrivateImportUsage]
            )
            offset = load(offsets.at[codebook, pl.ds(first_of(tile), tile_size)], by_column())
            offset = jax.lax.broadcast_in_dim(offset, products.shape, (1,))
            if score == "dot":
                new = products + offset
            else:
                distances = _spread(query_norms, tile_size) + offset - 2.0 * products
                new = -jnp.log(IDW_EPSILON + jnp.maximum(distances, 0.0))
            return _best_of((new, _iota(tile_size) + first_of(tile)), best, top_k)

        return jax.lax.fori_loop(0, tiles, improve, _no_best(top_k))

    best = pl.run_scoped(
        of_group,
        tuple(_operand(*_key_tile(tile_size, WIDTH), slots=groups * _SLOTS) for _ in range(3)),
        plgpu.Barrier(num_arrivals=3, num_barriers=groups * _SLOTS),
        collective_axes="group",
    )
    if groups == 1:
        _best_of(best, _no_best(top_k), top_k, emit)
        return
    plgpu.barrier_arrive(scored)

    def exchange(score_tile: Any, id_tile: Any) -> None:
        plgpu.barrier_wait(scored)  # Both groups are done with what this memory held.

        @pl.when(group == 1)
        def _():
            score_tile[...], id_tile[...] = best

        plgpu.barrier_arrive(exchanged)

        @pl.when(group == 0)
        def _():
            plgpu.barrier_wait(exchanged)
            _best_of(tuple(load(x, matrix()) for x in (score_tile, id_tile)), best, top_k, emit)

    shape = (TOKENS, _rounded(top_k))
    transforms = (plgpu.TilingTransform((8, 8)), plgpu.SwizzleTransform(32))
    tiles = (plgpu.SMEM(shape, x, transforms=transforms) for x in (jnp.float32, jnp.int32))
    pl.run_scoped(exchange, *tiles, collective_axes="group")


def _best_of(
    new: tuple[jax.Array, ...],
    old: tuple[jax.Array, ...],
    top_k: int,
    emit: Callable[[Any, jax.Array, jax.Array], None] = lambda *_: None,
) -> tuple[jax.Array, jax.Array]:
    """Scores and ids `[TOKENS, rounded]` of the best of `new` and `old`, which have the same form.

    `emit` gets each rank, and the ids and scores of that rank.
    """
    new_ids, old_ids = new[1], old[1]
    ranks = _iota(_rounded(top_k))

    def take(rank: Any, carry: Any) -> Any:
        rank = index32(rank)
        new, old, (taken, taken_ids) = carry
        top = jnp.maximum(jnp.max(new, axis=1), jnp.max(old, axis=1))
        chosen = jnp.minimum(_lowest(new, new_ids, top), _lowest(old, old_ids, top))
        emit(rank, chosen, top)
        new = jnp.where(new_ids == _spread(chosen, new.shape[1]), -jnp.inf, new)
        here = ranks == rank
        spread = _spread(chosen, ranks.shape[1])
        old = jnp.where(old_ids == spread, -jnp.inf, old)
        taken = jnp.where(here, _spread(top, ranks.shape[1]), taken)
        taken_ids = jnp.where(here, spread, taken_ids)
        return new, old, (taken, taken_ids)

    return jax.lax.fori_loop(0, top_k, take, (new[0], old[0], _no_best(top_k)))[2]


def _key_tile(subkeys: Any, columns: Any) -> tuple[Any, Any]:
    """Both in the order of a key tile's axes."""
    return (columns, subkeys) if _by_columns() else (subkeys, columns)


def _by_columns() -> bool:
    """Whether key tiles arrive as wgmma multiplies them. Else it transposes them, and XLA need not.

    jax 0.10's interpreter does not transpose refs.
    """
    return jax.__version_info__ < (0, 11) and dispatch.interpreted()  # TODO: drop once jax>=0.11.


def _lowest(scores: jax.Array, ids: jax.Array, best: jax.Array) -> jax.Array:
    """The lowest id whose score equals `best`, for each row."""
    equal = scores == _spread(best, scores.shape[1])
    return jnp.min(jnp.where(equal, ids, NOTHING), axis=1)


def _no_best(top_k: int) -> tuple[jax.Array, jax.Array]:
    shape = (TOKENS, _rounded(top_k))
    scores = jnp.full(shape, -jnp.inf, jnp.float32)
    ids = jnp.full(shape, NOTHING, jnp.int32)
    return laid_out(scores, matrix()), laid_out(ids, matrix())


def _rounded(top_k: int) -> int:
    return math.ceil(top_k / 8) * 8  # The accumulator's layout has at least eight columns.


def _spread(of_row: jax.Array, columns: int) -> jax.Array:
    return jax.lax.broadcast_in_dim(of_row, (TOKENS, columns), (0,))


def _iota(columns: int) -> jax.Array:
    if dispatch.interpreted():
        return jax.lax.broadcasted_iota(jnp.int32, (TOKENS, columns), 1)
    return plgpu.broadcasted_iota(jnp.int32, (TOKENS, columns), 1, layout=matrix())


def key_terms(terms: Sequence[jax.Array]) -> list[jax.Array]:
    """The terms `[codebooks, subkeys, half]` in the order in which tiles of them are read."""
    return [x.transpose(0, *_key_tile(1, 2)) for x in terms]


def terms_of(x: jax.Array, *, count: int = 3) -> list[jax.Array]:
    """Bfloat16 arrays whose sum is the float32 one: exactly with three, to 2^-17 with two."""
    terms = []
    for _ in range(count):
        # XLA may remove a plain cast to bfloat16 and back, which would make lower terms zero.
        term = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        terms.append(term.astype(jnp.bfloat16))
        x = x - term
    return terms


def _operand(rows: int, columns: int, *, slots: int) -> Any:
    """Shared memory for a bfloat16 tile, tiled and swizzled as wgmma and TMA need it."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((slots, rows, columns), jnp.bfloat16, transforms=transforms)
