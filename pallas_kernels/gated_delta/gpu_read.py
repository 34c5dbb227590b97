"""GPU: computes the outputs of all chunks in parallel from the memories at their starts."""

import functools

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta.arguments import CHUNK, WIDTH_STEP, Residuals, Vectors
from pallas_kernels.gated_delta.gpu_chunk import (
    chunk_tokens,
    column_blocks,
    decays_between,
    launch,
    program_place,
)
from pallas_kernels.gated_delta.gpu_tiles import (
    COLUMN,
    load,
    multiply,
    put,
    received,
    rows_times,
    smem,
    smem_halves,
    start_copies,
    store,
)


def read(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    vectors: Vectors,
    saved: Residuals,
    *,
    scale: float,
) -> jax.Array:
    """The output `[batch, length, heads, value]`, in the keys' dtype.

    Args:
      query: `[batch, length, heads, key]`, float32 or bfloat16; length a multiple of the chunk.
      key: `[batch, length, heads, key]`, of the same dtype.
      value: `[batch, length, heads, value]`, of the same dtype.
      vectors: decays and write strengths per token.
      saved: the chunks' memories and inverses.
      scale: factor on the queries.
    """
    width = key.shape[-1]
    return launch(
        functools.partial(_read_kernel, scale=scale),
        query,
        key,
        value,
        *vectors[:-1],  # It needs no decay to the chunk's end.
        *saved,
        out_type=jax.ShapeDtypeStruct(value.shape, key.dtype),
        scratch=[
            *(smem_halves(CHUNK, width, of=key.dtype) for _ in range(2)),
            smem_halves(width, WIDTH_STEP, of=key.dtype),
            *(smem_halves(CHUNK, CHUNK, of=key.dtype) for _ in range(3)),
            smem(CHUNK, WIDTH_STEP, key.dtype, slots=2),
            smem(CHUNK, WIDTH_STEP, key.dtype, slots=width // WIDTH_STEP),
            plgpu.Barrier(num_barriers=2 + width // WIDTH_STEP),
        ],
        grid=vectors.beta.shape[:3],
        name="gated_delta_read",
    )


def _read_kernel(query, key, value, span_sums, beta, to_token, *refs, scale):
    states, inverses, output, *scratch = refs
    queries, keys, memory, inverse, attention, errors, stage, wide_stage, arrived = scratch
    place = program_place()
    tokens = chunk_tokens(place)
    beta, to_token = (load(x.at[place], COLUMN) for x in (beta, to_token))
    blocks, columns = column_blocks(key), column_blocks(value)
    barriers = [arrived.at[i] for i in range(2 + len(blocks))]
    barriers, wide_barriers = barriers[:2], barriers[2:]

    def start(sources):
        return start_copies([(x, stage.at[i]) for i, x in enumerate(sources)], barriers)

    def start_wide(sources):
        return start_copies([(x, wide_stage.at[i]) for i, x in enumerate(sources)], wide_barriers)

    def start_memory(at):
        return start_wide([states.at[(*place, rows, at)] for rows in blocks])

    # Copies start before what they wait behind: the decays are computed meanwhile.
    of_inverse = start_wide([inverses.at[place]])
    arriving = start([x.at[(*tokens, blocks[0])] for x in (query, key)])
    between = decays_between(span_sums.at[place])
    put(inverse, received(*of_inverse), reused=True)
    of_memory = start_memory(columns[0])
    for at, following in zip(blocks, [*blocks[1:], None], strict=True):
        put(queries.at(slice(None), at), received(arriving[0]))
        put(keys.at(slice(None), at), received(arriving[1]))
        if following is not None:
            arriving = start([x.at[(*tokens, following)] for x in (query, key)])
    of_value = start([value.at[(*tokens, columns[0])]])
    put(attention, scale * multiply(queries, keys.transposed) * between)

    for at, following in zip(columns, [*columns[1:], None], strict=True):
        for rows, copy in zip(blocks, of_memory, strict=True):
            put(memory.at(rows), received(copy), reused=True)
        # W again, for 64 columns of values: V minus what the memory recalls, through the inverse.
        own = received(*of_value) - rows_times(to_token, multiply(keys, memory))
        if following is not None:
            of_memory, of_value = start_memory(following), start([value.at[(*tokens, following)]])
        put(errors, rows_times(beta, own))
        put(errors, multiply(inverse, errors), reused=True)
        # O = scale * to_token * Q H + P W.
        found = rows_times(scale * to_token, multiply(queries, memory))
        found += multiply(attention, errors)
        store(found, output.at[(*tokens, at)], stage=stage.at[1])  # The next value is in the other.
