"""GPU: the backward pass after the transposed walk, one program for each chunk of each head.

The letters are those of docs/explanation/math.md. The parts follow one another: the attention and
the inverse, the values, the square tiles, and keys with queries. Tiles of tokens have 32 columns,
because two square sums stay in registers beside them. The errors W and the cotangents dH, which
the part for keys reads again, go through GPU memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP, Residuals, Vectors
from pallas_kernels.gated_delta.gpu_after_program import (
    BLOCK,
    GlobalRefs,
    Program,
    block_at,
    halves,
    row_sum,
    send_block,
    stages,
    zeros,
)
from pallas_kernels.gated_delta.gpu_chunk import (
    chunk_tokens,
    column_blocks,
    decays_between,
    launch,
    positions,
    program_place,
)
from pallas_kernels.gated_delta.gpu_tiles import (
    Halves,
    add_product,
    gpu_halves,
    joined,
    load,
    multiply,
    put,
    received,
    rows_times,
    smem,
    start_copies,
    start_sending,
    two_halves,
)


class ChunkCotangents(NamedTuple):
    """Cotangents of tokens `[batch, length, heads, width]`, of vectors as `arguments.Vectors`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array
    log_spans: jax.Array
    """The part of the log decays' cotangent that comes from decays between two tokens."""
    log_to_token: jax.Array
    """Cotangent of the logarithm of each token's `to_token`."""
    log_to_end: jax.Array
    """Cotangent of the logarithm of each token's `to_end`."""


def after_walk(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    vectors: Vectors,
    saved: Residuals,
    d_output: jax.Array,
    d_after: jax.Array,
    *,
    scale: float,
) -> ChunkCotangents:
    """Cotangents of a chunk's inputs, from the cotangent of the memory after it.

    Args: as for `before_walk`; `value [batch, length, heads, value]`; `saved`, the memories before
      the chunks and the inverses; `d_after [batch, chunks, heads, key, value]`, in the keys' dtype.
    """
    place, width = vectors.beta.shape[:3], key.shape[-1]
    half = gpu_halves((*place, CHUNK, value.shape[-1]), of=key.dtype)
    vector = jax.ShapeDtypeStruct((*place, CHUNK), jnp.float32)
    results = launch(
        functools.partial(_after_kernel, scale=scale),
        query,
        key,
        value,
        *vectors,
        *saved,
        d_output,
        d_after,
        out_type=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)),
            *(vector for _ in range(4)),
            *half.refs,
            *half.refs,
        ],
        scratch=[
            halves(CHUNK, width, of=key.dtype),
            halves(CHUNK, CHUNK, of=key.dtype),
            halves(CHUNK, CHUNK, of=key.dtype),
            Halves(smem(CHUNK, CHUNK, jnp.float32, slots=1)),
            plgpu.SMEM((1,), jnp.int32),
            plgpu.Barrier(num_barriers=2 * width // BLOCK + 2),
        ],
        grid=place,
        name="gated_delta_after_walk",
    )
    return ChunkCotangents(*results[:7])


def _after_kernel(*refs, scale):
    *refs, keys, inverse, attention, between, zero, arrived = refs
    named = len(GlobalRefs._fields) - 2
    gmem = GlobalRefs._make([*refs[:named], *two_halves(refs[named:])])
    zero[0] = jnp.int32(0)
    plgpu.commit_smem()  # All threads read it.
    place = program_place()
    barriers = [arrived.at[i] for i in range(arrived.shape[0])]
    program = Program(
        gmem, scale, keys, inverse, attention, between, zero, barriers, place, chunk_tokens(place)
    )
    width, dtype = gmem.key.shape[-1], gmem.key.dtype
    square, block = halves(CHUNK, CHUNK, of=dtype), halves(CHUNK, BLOCK, of=dtype)
    # A part's shared memory is free again for the next part.
    pl.run_scoped(
        functools.partial(_attend, program),
        block,
        stages(dtype, slots=2 * width // BLOCK),
        stages(dtype, slots=CHUNK // BLOCK),
    )
    sums = pl.run_scoped(
        functools.partial(_of_values, program),
        halves(width, BLOCK, of=dtype),
        block,
        block,
        stages(dtype, slots=1),
        stages(dtype, slots=2 * width // WIDTH_STEP + 1),
    )

    def of_squares_and_keys(d_scores):
        pl.run_scoped(
            functools.partial(_of_squares, program, *sums, d_scores), halves(CHUNK, CHUNK)
        )
        # 64 columns of keys at a time: the sums over the values of all would not fit in registers.
        of_token, of_end = row_sum(zeros(BLOCK)), row_sum(zeros(BLOCK))
        for start in range(0, width, WIDTH_STEP):
            from_values, more_of_token, more_of_end = pl.run_scoped(
                functools.partial(_from_values, program, start),
                block,
                block,
                halves(WIDTH_STEP, BLOCK, of=dtype),
                stages(dtype, slots=2),
            )
            of_token, of_end = of_token + more_of_token, of_end + more_of_end
            of_token += pl.run_scoped(
                functools.partial(_of_keys, program, start, d_scores, *from_values),
                block,
                stages(dtype, slots=WIDTH_STEP // BLOCK),
                stages(dtype, slots=2),
            )
        gmem.d_log_to_token.at[place][...] = of_token
        gmem.d_log_to_end.at[place][...] = program.column(gmem.to_end) * of_end

    pl.run_scoped(of_squares_and_keys, square)


def _attend(program: Program, queries: Halves, stage: Any, wide_stage: Any) -> None:
    """Fills the tiles that several parts use: the keys, the attention P and the inverse."""
    gmem = program.gmem
    keys, inverse, attention, queries = program.recomputed(*program[2:5], queries)
    blocks, sides = column_blocks(gmem.key, BLOCK), column_blocks(gmem.inverses, BLOCK)
    tokens = [x.at[(*program.tokens, at)] for at in blocks for x in (gmem.key, gmem.query)]
    squares = [gmem.inverses.at[(*program.place, slice(None), at)] for at in sides]
    tiles = [
        x.at[i] for x, n in ((stage, len(tokens)), (wide_stage, len(squares))) for i in range(n)
    ]
    # All copies start at once; each has a barrier of its own, in the order of their use.
    copies = start_copies(list(zip([*tokens, *squares], tiles, strict=True)), program.arrived)
    of_keys, of_queries = copies[: len(tokens) : 2], copies[1 : len(tokens) : 2]
    (between,) = program.recomputed(program.between)
    # The decays are computed while the copies arrive.
    between.hi[...] = decays_between(gmem.span_sums.at[program.place])
    attended = zeros(CHUNK)
    for at, of_key, of_query in zip(blocks, of_keys, of_queries, strict=True):
        block = put(keys.at(slice(None), at), received(of_key), reused=True)
        put(queries, received(of_query))
        attended += multiply(queries, block.transposed)
    # P = scale * (Q K^T) * between; the mask is part of the decays.
    attended *= program.scale
    put(attention, attended * load(between.hi))
    for at, copy in zip(sides, copies[len(tokens) :], strict=True):
        put(inverse.at(slice(None), at), received(copy))


def _of_values(
    program: Program, memory: Halves, a: Halves, b: Halves, stage: Any, wide_stage: Any
) -> tuple:
    """Computes W, dV and dH; sums dP, dA and a part of dbeta over the values."""
    gmem, place, groups = program.gmem, program.place, column_blocks(program.gmem.key)
    slots = (*program[2:5], memory, a, b)

    def add_block(i, sums):
        d_attention, d_triangle, of_beta = sums
        keys, inverse, attention, memory, a, b = program.recomputed(*slots)
        columns = block_at(i)
        part, tokens = (*place, slice(None), columns), (*program.tokens, columns)
        squares = [
            x.at[(*place, at, columns)] for x in (gmem.states, gmem.d_after) for at in groups
        ]
        wide = enumerate([*squares, gmem.d_output.at[tokens]])
        *squares, d_output, value = start_copies(
            [*((x, wide_stage.at[i]) for i, x in wide), (gmem.value.at[tokens], stage.at[0])],
            program.arrived,
        )
        # The memory before the chunk, H.
        for at, copy in zip(groups, squares[: len(groups)], strict=True):
            put(memory.at(at), received(copy))
        # W = inverse (beta * (V - to_token * K H)), recomputed.
        recalled = rows_times(program.column(gmem.to_token), multiply(keys, memory))
        own_error = received(value) - recalled
        put(a, rows_times(program.column(gmem.beta), own_error))
        start_sending(a, multiply(inverse, a), gmem.errors.at(*part), reused=True)
        put(b, received(d_output))
        # dP += dO W^T.
        d_attention = add_product(d_attention, b, a.transposed)
        # The same tile takes the cotangent of the memory after the chunk, dH'.
        for at, copy in zip(groups, squares[len(groups) :], strict=True):
            put(memory.at(at), received(copy))
        keys, inverse, attention, memory, a, b = program.recomputed(*slots)
        # dW = (to_end * K) dH' + P^T dO.
        d_errors = rows_times(program.column(gmem.to_end), multiply(keys, memory))
        d_errors = add_product(d_errors, attention.transposed, b)
        put(b, d_errors, reused=True)
        # Back through the inverse; dA = -(inverse^T dW) W^T follows from the derivative of
        # an inverse.
        d_weighted = multiply(inverse.transposed, b)
        put(b, d_weighted, reused=True)
        d_triangle = add_product(d_triangle, b, a.transposed)
        of_beta += row_sum(d_weighted * own_error)
        # From here it is dV, and with the decay the cotangent of what the keys recalled.
        d_weighted = rows_times(program.column(gmem.beta), d_weighted)
        send_block(stage.at[0], d_weighted, gmem.d_value.at[tokens])
        d_recalled = rows_times(-program.column(gmem.to_token), d_weighted)
        start_sending(b, d_recalled, gmem.d_recalled.at(*part))
        # The stages are free only when their copies are out.
        plgpu.wait_smem_to_gmem(0)
        return d_attention, d_triangle, of_beta

    # A loop, not unrolled: the sums stay in registers over all blocks of values.
    sums = zeros(CHUNK), zeros(CHUNK), row_sum(zeros(BLOCK))
    return jax.lax.fori_loop(0, gmem.value.shape[-1] // BLOCK, add_block, sums)


def _of_squares(
    program: Program,
    d_attention: jax.Array,
    d_triangle: jax.Array,
    of_beta: jax.Array,
    d_scores: Halves,
    b: Halves,
) -> None:
    """Computes dbeta, the spans' part of the decays' cotangent, and two square tiles for the keys.

    The cotangent of the products of keys with keys overwrites the inverse.
    """
    gmem, place = program.gmem, program.place
    # The sums over the values one after the other, decays and attention from shared memory where
    # they are used: all at once would not fit in registers.
    scores, between = program.recomputed(d_scores, program.between)
    put(scores, d_attention * load(between.hi))
    keys, inverse, between = program.recomputed(program.keys, program.inverse, program.between)
    row, column = positions()
    # Only entries below the diagonal are part of the triangular matrix.
    put(inverse, jnp.where(row > column, -d_triangle, 0.0) * load(between.hi))
    overlap, d_lower = multiply(keys, keys.transposed), joined(inverse)
    gmem.d_beta.at[place][...] = of_beta + row_sum(d_lower * overlap)
    d_lower = rows_times(program.column(gmem.beta), d_lower)
    put(inverse, d_lower, reused=True)
    # Sums of spans cancel, so that they need both halves with every dtype.
    attention, b = program.recomputed(program.attention, b)
    of_spans = d_lower * overlap + d_attention * joined(attention)
    spans = put(Halves(attention.hi, b.lo), of_spans, reused=True)
    gmem.d_log_spans.at[place][...] = _spanning(spans, b.hi)


def _from_values(
    program: Program, start: int, a: Halves, b: Halves, square: Halves, wide_stage: Any
) -> tuple:
    """Sums over the values for 64 columns of keys: dK so far, `dO S^T` and of the decays' part."""
    gmem = program.gmem
    rows = [slice(at, at + BLOCK) for at in range(0, WIDTH_STEP, BLOCK)]
    empty = [zeros(BLOCK) for _ in rows]

    def add_block(i, sums, *, left, matrices, outputs):
        tiles = program.recomputed(a, b, square)
        columns = block_at(i)
        part = (*program.place, slice(None), columns)
        square_columns = (*program.place, pl.ds(start, WIDTH_STEP), columns)
        of_square, *more = start_copies(
            [
                (matrices.at[square_columns], wide_stage.at[0]),
                *((x.at[(*program.tokens, columns)], wide_stage.at[1]) for x in outputs),
                *zip(left.at(*part).refs, tiles[0].refs, strict=True),
            ],
            program.arrived,
        )
        put(tiles[2], received(of_square))
        turned = [tiles[2].at(at).transposed for at in rows]
        for _ in outputs:
            put(tiles[1], received(more.pop(0)))
        # The rest was copied as operands, without the way through registers.
        for _, arrived in more:
            plgpu.barrier_wait(arrived)
        return [
            [add_product(x, tile, right) for x, right in zip(total, turned, strict=True)]
            for total, tile in zip(sums, tiles[: len(sums)], strict=True)
        ]

    def summed(left, matrices, *outputs):
        add = functools.partial(add_block, left=left, matrices=matrices, outputs=outputs)
        blocks = gmem.value.shape[-1] // BLOCK
        return jax.lax.fori_loop(0, blocks, add, [empty for _ in (left, *outputs)])

    keys = [program.keys.at(0, slice(None), pl.ds(start + at.start, BLOCK)) for at in rows]
    d_keys, from_output = summed(gmem.d_recalled, gmem.states, gmem.d_output)
    # The cotangent of a log decay is the product of what it scales with its cotangent.
    of_token = sum(row_sum(joined(x) * y) for x, y in zip(keys, d_keys, strict=True))
    (from_end,) = summed(gmem.errors, gmem.d_after)
    of_end = sum(row_sum(joined(x) * y) for x, y in zip(keys, from_end, strict=True))
    to_end = program.column(gmem.to_end)
    d_keys = [x + rows_times(to_end, y) for x, y in zip(d_keys, from_end, strict=True)]
    return (d_keys, from_output), of_token, of_end


def _of_keys(
    program: Program,
    start: int,
    d_scores: Halves,
    d_keys: list,
    from_output: list,
    queries: Halves,
    stage: Any,
    out: Any,
) -> jax.Array:
    """Computes 64 columns of dK and dQ; returns their part of `log_to_token`'s cotangent."""
    gmem, of_token = program.gmem, row_sum(zeros(BLOCK))
    to_token = program.column(gmem.to_token)
    slots = (*program[2:4], d_scores, queries)
    blocks = [(*program.tokens, pl.ds(start + at, BLOCK)) for at in range(0, WIDTH_STEP, BLOCK)]
    copies = start_copies(
        [(gmem.query.at[at], stage.at[i]) for i, at in enumerate(blocks)], program.arrived
    )
    for i, at in enumerate(blocks):
        keys, d_overlap, d_scores, queries = program.recomputed(*slots)
        block = keys.at(slice(None), at[-1])
        query = received(copies[i])
        put(queries, query)
        of_token += program.scale * to_token * row_sum(query * from_output[i])
        d_block = d_keys[i] + program.scale * multiply(d_scores.transposed, queries)
        # K K^T has the keys twice, so both sides of its cotangent reach them.
        d_block = add_product(d_block, d_overlap, block)
        d_block = add_product(d_block, d_overlap.transposed, block)
        d_queries = add_product(rows_times(to_token, from_output[i]), d_scores, block)
        plgpu.wait_smem_to_gmem(0)  # What the last block of columns sent.
        send_block(out.at[0], d_block, gmem.d_key.at[at])
        send_block(out.at[1], program.scale * d_queries, gmem.d_query.at[at])
    plgpu.wait_smem_to_gmem(0)
    return of_token


def _spanning(of_spans: Halves, mask: Any) -> jax.Array:
    """For each token t the sum of the cotangents of all spans `s < t <= r`, as a column."""
    row, column = positions()
    mask[...] = jnp.where(column >= row, 1.0, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def accumulate(total):
        plgpu.wgmma(total, mask, of_spans.lo)
        plgpu.wgmma(total, mask, of_spans.hi)
        return total[...]

    # A product with a triangle of ones is the running sum, in both bfloat16 halves.
    later = pl.run_scoped(
        accumulate, plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK), jnp.float32)
    )  # [t, s]: r >= t
    return row_sum(jnp.where(column < row, later, 0.0))
