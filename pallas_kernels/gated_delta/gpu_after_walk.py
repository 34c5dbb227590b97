"""GPU: the backward pass after the transposed walk, one program for each chunk of each head.

The letters are those of docs/explanation/math.md. The kernel processes values 64 columns at a time,
then keys. Sums over the values stay in registers. The errors W and the cotangents dH, which the
part for keys reads again, go through GPU memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import gpu_interpreter
from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP, Residuals, Vectors
from pallas_kernels.gated_delta.gpu_chunk import (
    GRID_NAMES,
    chunk_tokens,
    column_blocks,
    decays_between,
    positions,
    program_place,
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
            smem_halves(CHUNK, width, of=key.dtype),
            smem_halves(width, WIDTH_STEP),
            *(smem_halves(CHUNK, CHUNK) for _ in range(4)),
            smem(CHUNK, WIDTH_STEP, key.dtype),
            smem(CHUNK, WIDTH_STEP, jnp.float32),
            plgpu.Barrier(),
        ],
        grid=place,
        grid_names=GRID_NAMES,
        kernel_name="gated_delta_after_walk",
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
    place = program_place()
    tokens = chunk_tokens(place)
    beta, to_token, to_end = (load(x.at[place], COLUMN) for x in (beta, to_token, to_end))
    fetch = functools.partial(fetched, stage=stage, arrived=arrived)
    fetch_wide = functools.partial(fetched, stage=wide_stage, arrived=arrived)
    blocks, value_blocks = column_blocks(key), column_blocks(value)

    attended = _zeros()
    for columns in blocks:
        put(keys.at(slice(None), columns), fetch(key.at[(*tokens, columns)]))
        put(a, scale * fetch(query.at[(*tokens, columns)]))
        attended += multiply(a, keys.at(slice(None), columns).transposed)
    put(attention, attended * decays_between(load(log_decay.at[place], ROW), a, b))
    put(inverse, fetch_wide(inverses.at[place]))

    # Values: computes W, dV and dH, and sums dP and dA over the blocks of values.
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

    # The square tiles: the cotangents overwrite the inverse and the attention.
    row, column = positions()
    # Computed again: together with the sums over the values they would not fit in registers.
    between = decays_between(load(log_decay.at[place], ROW), a, b)
    overlap = multiply(keys, keys.transposed)
    d_lower = jnp.where(row > column, -d_triangle, 0.0) * between
    of_beta += _row_sum(d_lower * overlap)
    d_beta.at[place][...] = of_beta
    d_lower = rows_times(beta, d_lower)
    put(a, d_attention * joined(attention) + d_lower * overlap)
    d_log_spans.at[place][...] = _spanning(a, b.hi)
    d_overlap, d_scores = put(inverse, d_lower), put(attention, d_attention * between)

    # Keys and queries, one block of columns at a time.
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
    """For each token t the sum of the cotangents of all spans `s < t <= r`, as a column."""
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


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((CHUNK, WIDTH_STEP), jnp.float32), plgpu.Layout.WGMMA)


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1)
