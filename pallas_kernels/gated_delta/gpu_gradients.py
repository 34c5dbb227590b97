"""GPU: the backward pass's two parallel stages, before and after the transposed walk.

Each program has one chunk of one head. The letters are those of docs/math.md. Values are taken 64
columns at a time, then keys; what is summed over the values stays in registers, and the errors W
and the cotangents dH, which the keys' part reads again, pass through GPU memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import gpu_interpreter
from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP, Residuals
from pallas_kernels.gated_delta.gpu_prepare import (
    chunk_tokens,
    decays_between,
    positions,
    send_factors,
)
from pallas_kernels.gated_delta.gpu_tiles import (
    COLUMN,
    ROW,
    Halves,
    compiler_params,
    fetched,
    joined,
    load,
    multiply,
    put,
    rows_times,
    send,
    send_through,
    smem,
    smem_halves,
)

GRID_NAMES = ("batch", "chunks", "heads")


class Vectors(NamedTuple):
    """Per token, `[batch, chunks, heads, chunk]` float32."""

    log_decay: jax.Array
    beta: jax.Array
    to_token: jax.Array
    to_end: jax.Array


class BeforeWalk(NamedTuple):
    """What the transposed walk takes of every chunk."""

    d_errors: jax.Array
    """`P^T dO`, `[batch, chunks, heads, chunk, value]` float32."""
    step: jax.Array
    """`(gamma Q)^T dO`, `[batch, chunks, heads, key, value]` float32."""
    left: Halves
    """`-Y`, `[batch, chunks, heads, chunk, key]` bfloat16."""
    right: Halves
    """Keys times the decay to the chunk's end, like `left`."""


class ChunkCotangents(NamedTuple):
    """Of tokens `[batch, length, heads, width]`; of vectors `[batch, chunks, heads, chunk]`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array
    log_spans: jax.Array
    """Of the log decays, by the decays between two tokens."""
    log_to_token: jax.Array
    """Of the logarithm of each token's `to_token`."""
    log_to_end: jax.Array
    """Of the logarithm of each token's `to_end`."""


def before_walk(
    query: jax.Array,
    key: jax.Array,
    vectors: Vectors,
    inverse: jax.Array,
    d_output: jax.Array,
    *,
    scale: float,
) -> BeforeWalk:
    """Cotangents that reach the errors and the memory through a chunk's own output.

    Args:
      query: `[batch, length, heads, key]`.
      key: `[batch, length, heads, key]`.
      vectors: per token.
      inverse: `[batch, chunks, heads, chunk, chunk]`.
      d_output: `[batch, length, heads, value]` float32.
      scale: factor on the queries.
    """
    place, width, value = vectors.beta.shape[:3], key.shape[-1], d_output.shape[-1]
    half = jax.ShapeDtypeStruct((*place, CHUNK, width), jnp.bfloat16)
    d_errors, step, *halves = plgpu.kernel(
        functools.partial(_before_kernel, scale=scale),
        out_type=[
            jax.ShapeDtypeStruct((*place, CHUNK, value), jnp.float32),
            jax.ShapeDtypeStruct((*place, width, value), jnp.float32),
            *(half for _ in range(4)),
        ],
        scratch_types=[
            *(smem_halves(CHUNK, width) for _ in range(2)),
            *(smem_halves(CHUNK, CHUNK) for _ in range(3)),
            smem(CHUNK, WIDTH_STEP, key.dtype),
            smem(CHUNK, WIDTH_STEP, jnp.float32),
            plgpu.Barrier(),
        ],
        grid=place,
        grid_names=GRID_NAMES,
        compiler_params=compiler_params(),
        interpret=gpu_interpreter(),
    )(query, key, *vectors, inverse, d_output)
    return BeforeWalk(d_errors, step, Halves(*halves[:2]), Halves(*halves[2:]))


def _before_kernel(query, key, log_decay, beta, to_token, to_end, inverse, d_output, *refs, scale):
    d_errors, step, left_hi, left_lo, right_hi, right_lo, *scratch = refs
    queries, keys, inverse_tile, attention, work, stage, wide_stage, arrived = scratch
    place = tuple(jax.lax.axis_index(name) for name in GRID_NAMES)
    tokens = chunk_tokens(place)
    beta, to_token, to_end = (load(x.at[place], COLUMN) for x in (beta, to_token, to_end))
    fetch = functools.partial(fetched, stage=stage, arrived=arrived)
    fetch_wide = functools.partial(fetched, stage=wide_stage, arrived=arrived)

    blocks = _blocks(key)
    for columns in blocks:
        put(queries.at(slice(None), columns), scale * fetch(query.at[(*tokens, columns)]))
        put(keys.at(slice(None), columns), fetch(key.at[(*tokens, columns)]))
    between = decays_between(load(log_decay.at[place], ROW), attention, work)
    put(attention, multiply(queries, keys.transposed) * between)
    put(inverse_tile, fetch_wide(inverse.at[place]))
    for columns in blocks:
        block = joined(keys.at(slice(None), columns))
        part = (*place, slice(None), columns)
        left, right = Halves(left_hi, left_lo).at(*part), Halves(right_hi, right_lo).at(*part)
        send_factors(inverse_tile, work, block, beta * to_token, to_end, left, right)
        block = scale * fetch(query.at[(*tokens, columns)])
        put(queries.at(slice(None), columns), rows_times(to_token, block))

    for columns in _blocks(d_output):
        put(work, fetch_wide(d_output.at[(*tokens, columns)]))
        d_errors.at[(*place, slice(None), columns)][...] = multiply(attention.transposed, work)
        for rows in blocks:
            block = queries.at(slice(None), rows)
            step.at[(*place, rows, columns)][...] = multiply(block.transposed, work)


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
    """Cotangents of a chunk's inputs, given that of the memory after it.

    Args: as `before_walk`, and `value [batch, length, heads, value]`; `saved`, the memories before
      the chunks and the inverses; `d_after [batch, chunks, heads, key, value]` float32.
    """
    place, width = vectors.beta.shape[:3], key.shape[-1]
    half = jax.ShapeDtypeStruct((*place, CHUNK, value.shape[-1]), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((*place, CHUNK), jnp.float32)
    results = plgpu.kernel(
        functools.partial(_after_kernel, scale=scale),
        out_type=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)),
            *(vector for _ in range(4)),
            *(half for _ in range(4)),
        ],
        scratch_types=[
            smem_halves(CHUNK, width),
            smem_halves(width, WIDTH_STEP),
            *(smem_halves(CHUNK, CHUNK) for _ in range(4)),
            smem(CHUNK, WIDTH_STEP, key.dtype),
            smem(CHUNK, WIDTH_STEP, jnp.float32),
            plgpu.Barrier(),
        ],
        grid=place,
        grid_names=GRID_NAMES,
        compiler_params=compiler_params(),
        interpret=gpu_interpreter(),
    )(query, key, value, *vectors, *saved, d_output, d_after)
    return ChunkCotangents(*results[:7])


def _after_kernel(*refs, scale):
    query, key, value, log_decay, beta, to_token, to_end, states, inverses, *refs = refs
    d_output, d_after, d_query, d_key, d_value, d_beta, d_log_spans, *refs = refs
    d_log_to_token, d_log_to_end, errors_hi, errors_lo, d_recalled_hi, d_recalled_lo, *refs = refs
    keys, memory, inverse, attention, a, b, stage, wide_stage, arrived = refs
    errors, d_recalled = Halves(errors_hi, errors_lo), Halves(d_recalled_hi, d_recalled_lo)
    place = tuple(jax.lax.axis_index(name) for name in GRID_NAMES)
    tokens = chunk_tokens(place)
    beta, to_token, to_end = (load(x.at[place], COLUMN) for x in (beta, to_token, to_end))
    fetch = functools.partial(fetched, stage=stage, arrived=arrived)
    fetch_wide = functools.partial(fetched, stage=wide_stage, arrived=arrived)
    blocks, value_blocks = _blocks(key), _blocks(value)

    attended = _zeros()
    for columns in blocks:
        put(keys.at(slice(None), columns), fetch(key.at[(*tokens, columns)]))
        put(a, scale * fetch(query.at[(*tokens, columns)]))
        attended += multiply(a, keys.at(slice(None), columns).transposed)
    put(attention, attended * decays_between(load(log_decay.at[place], ROW), a, b))
    put(inverse, fetch_wide(inverses.at[place]))

    # Values: W, dV, dH; dP and dA summed over them.
    d_attention, d_triangle = _zeros(), _zeros()
    of_beta, of_token = _row_sum(_zeros()), _row_sum(_zeros())
    for columns in value_blocks:
        part = (*place, slice(None), columns)
        for rows in blocks:
            put(memory.at(rows), fetch_wide(states.at[(*place, rows, columns)]))
        recalled = multiply(keys, memory)
        own_error = fetch(value.at[(*tokens, columns)]) - rows_times(to_token, recalled)
        put(a, rows_times(beta, own_error))
        send(a, multiply(inverse, a), errors.at(*part))
        put(b, fetch_wide(d_output.at[(*tokens, columns)]))
        d_attention += multiply(b, a.transposed)
        for rows in blocks:
            put(memory.at(rows), fetch_wide(d_after.at[(*place, rows, columns)]))
        d_errors = multiply(attention.transposed, b) + rows_times(to_end, multiply(keys, memory))
        put(b, d_errors)
        d_weighted = multiply(inverse.transposed, b)
        put(b, d_weighted)
        d_triangle += multiply(b, a.transposed)
        of_beta += _row_sum(d_weighted * own_error)
        d_weighted = rows_times(beta, d_weighted)
        send_through(stage, d_weighted, d_value.at[(*tokens, columns)])
        d_weighted = rows_times(-to_token, d_weighted)
        of_token += _row_sum(d_weighted * recalled)
        send(b, d_weighted, d_recalled.at(*part))

    # The square tiles; the inverse's and the attention's places take their cotangents.
    row, column = positions()
    # Once more: kept in registers over the values, these would not all fit.
    between = decays_between(load(log_decay.at[place], ROW), a, b)
    overlap = multiply(keys, keys.transposed)
    d_lower = jnp.where(row > column, -d_triangle, 0.0) * between
    of_beta += _row_sum(d_lower * overlap)
    d_beta.at[place][...] = of_beta
    d_lower = rows_times(beta, d_lower)
    put(a, d_attention * joined(attention) + d_lower * overlap)
    d_log_spans.at[place][...] = _spanning(a, b.hi)
    d_overlap, d_scores = put(inverse, d_lower), put(attention, d_attention * between)

    # Keys and queries, a block of their columns at a time.
    of_end = _row_sum(_zeros())
    for columns in blocks:
        from_end, from_output, d_keys = _zeros(), _zeros(), _zeros()
        square = memory.at(slice(0, WIDTH_STEP))
        for values in value_blocks:
            part = (*place, slice(None), values)
            _fetch_halves(errors.at(*part), a, arrived)
            put(square, fetch_wide(d_after.at[(*place, columns, values)]))
            from_end += multiply(a, square.transposed)
            _fetch_halves(d_recalled.at(*part), a, arrived)
            put(square, fetch_wide(states.at[(*place, columns, values)]))
            d_keys += multiply(a, square.transposed)
            put(b, fetch_wide(d_output.at[(*tokens, values)]))
            from_output += multiply(b, square.transposed)
        block = keys.at(slice(None), columns)
        queries = scale * fetch(query.at[(*tokens, columns)])
        put(a, queries)
        of_end += _row_sum(joined(block) * from_end)
        of_token += to_token * _row_sum(queries * from_output)
        d_keys += rows_times(to_end, from_end) + multiply(d_scores.transposed, a)
        d_keys += multiply(d_overlap, block) + multiply(d_overlap.transposed, block)
        send_through(stage, d_keys, d_key.at[(*tokens, columns)])
        d_queries = rows_times(to_token, from_output) + multiply(d_scores, block)
        send_through(stage, scale * d_queries, d_query.at[(*tokens, columns)])
    d_log_to_token.at[place][...] = of_token
    d_log_to_end.at[place][...] = to_end * of_end


def _spanning(of_spans: Halves, mask: Any) -> jax.Array:
    """Sums of the cotangents of all spans that contain each token, a column: `s < t <= r`."""
    row, column = positions()
    mask[...] = jnp.where(column >= row, 1.0, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def accumulate(total):
        plgpu.wgmma(total, mask, of_spans.lo)
        plgpu.wgmma(total, mask, of_spans.hi)
        return total[...]

    later = pl.run_scoped(
        accumulate, plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK), jnp.float32)
    )  # [t, s]: r >= t
    return _row_sum(jnp.where(column < row, later, 0.0))


def _fetch_halves(source: Halves, tile: Halves, arrived: Any) -> None:
    plgpu.commit_smem()  # All warps are done with the tile.
    for there, half in zip(source, tile, strict=True):
        plgpu.copy_gmem_to_smem(there, half, arrived)
        plgpu.barrier_wait(arrived)


def _blocks(x: Any) -> list:
    """The last axis, 64 at a time."""
    return [pl.ds(start, WIDTH_STEP) for start in range(0, x.shape[-1], WIDTH_STEP)]


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((CHUNK, WIDTH_STEP), jnp.float32), plgpu.Layout.WGMMA)


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1)
