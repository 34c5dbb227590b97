"""TensorCore kernels: one asynchronous copy per row, many rows in flight, one token after another.

The table stays in HBM. A ring of VMEM buffers holds the rows of the next few tokens: while the
kernel sums one token's rows, the rows of later tokens are copied. Slot ids and weights of a tile of
tokens are in scalar memory, because they are needed as addresses and scalar factors.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fwpkm_jax.core.slots.write import PLAIN
from pallas_kernels import dispatch

REFERENCES = 4096
"""Largest number of references in a tile; their slot ids and weights must fit in scalar memory."""
TOKENS = 512
"""Largest number of tokens in a tile; their outputs, targets and errors must fit in VMEM."""
RING = 256
"""Rows in flight or waiting to be summed; 0.5 MiB at 512 columns."""
LANES = 128


def read(
    values: jax.Array,
    slot_ids: jax.Array,
    weights: jax.Array,
    target: jax.Array | None,
    write_weight: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """The output of `slot_read`, and its errors if targets are given."""
    tokens, places = slot_ids.shape
    width = values.shape[1]
    tile = _tile(tokens, places)
    tiles = pl.cdiv(tokens, tile)

    def summed(weights, rows, token):
        def step(p, total):
            return total + weights[0, 0, token * places + p] * rows[pl.ds(p, 1)]

        unroll = 8 if places % 8 == 0 else True if places < 8 else 1
        return jax.lax.fori_loop(0, places, step, jnp.zeros((1, width), jnp.float32), unroll=unroll)

    def read_body(slot_ids, weights, values, output, ring, sems):
        def use(token, rows):
            output[pl.ds(token, 1)] = summed(weights, rows, token)

        _stream_rows(slot_ids, values, ring, sems, tokens=tile, places=places, use=use)

    def error_body(slot_ids, weights, write_weight, target, values, output, errors, ring, sems):
        def use(token, rows):
            total = summed(weights, rows, token)
            output[pl.ds(token, 1)] = total
            weight = write_weight[0, 0, token]
            errors[pl.ds(token, 1)] = PLAIN.error(total, target[pl.ds(token, 1)], weight)

        _stream_rows(slot_ids, values, ring, sems, tokens=tile, places=places, use=use)

    scalars = pl.BlockSpec((1, 1, tile * places), lambda i: (i, 0, 0), memory_space=pltpu.SMEM)
    token_rows = pl.BlockSpec((tile, width), lambda i: (i, 0))
    in_specs = [scalars, scalars]
    operands = [_tiled(slot_ids, tile), _tiled(weights, tile)]
    if target is not None and write_weight is not None:
        per_token = pl.BlockSpec((1, 1, tile), lambda i: (i, 0, 0), memory_space=pltpu.SMEM)
        in_specs += [per_token, token_rows]
        operands += [_tiled(write_weight[:, None], tile), target]
    num_outputs = 1 if target is None else 2
    outputs = pl.pallas_call(
        read_body if target is None else error_body,
        grid=(tiles,),
        in_specs=[*in_specs, pl.BlockSpec(memory_space=pltpu.HBM)],
        out_specs=[token_rows] * num_outputs,
        out_shape=[jax.ShapeDtypeStruct((tokens, width), jnp.float32)] * num_outputs,
        scratch_shapes=_ring(values, places),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=dispatch.interpreted(),
        name="slot_read",
    )(*operands, values)
    return outputs[0], outputs[1] if num_outputs == 2 else None


def dot(values: jax.Array, slot_ids: jax.Array, vectors: jax.Array) -> jax.Array:
    """The result of `slot_dot`.

    A separate sum across lanes for each reference is slow. So the columns of each product are first
    folded to a vector of 128 lanes. Then the vectors of 128 references are transposed together and
    summed over sublanes.
    """
    tokens, places = slot_ids.shape
    width = values.shape[1]
    tile = _tile(tokens, places)
    tiles = pl.cdiv(tokens, tile)
    blocks = pl.cdiv(tile * places, LANES)
    folds = [slice(begin, min(begin + LANES, width)) for begin in range(0, width, LANES)]

    def body(slot_ids, vectors, values, output, products, ring, sems):
        if width < LANES:  # Only when interpreted; on devices a row fills all lanes.
            products[...] = jnp.zeros_like(products)

        def use(token, rows):
            product = rows[...] * vectors[pl.ds(token, 1)]
            # Adds whole vectors of lanes, without an exchange between lanes.
            folded = functools.reduce(jnp.add, [product[:, fold] for fold in folds])
            products[pl.ds(token * places, places), : folded.shape[1]] = folded

        _stream_rows(slot_ids, values, ring, sems, tokens=tile, places=places, use=use)

        @pl.loop(0, blocks)
        def _(i):
            # Transposed, the sum over a reference's lanes runs along sublanes for 128 at once.
            block = products[pl.ds(i * LANES, LANES)]
            output[0, pl.ds(i, 1)] = jnp.sum(block.T, axis=0, keepdims=True)

    output = pl.pallas_call(
        body,
        grid=(tiles,),
        in_specs=[
            pl.BlockSpec((1, 1, tile * places), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((tile, width), lambda i: (i, 0)),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec((1, blocks, LANES), lambda i: (i, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((tiles, blocks, LANES), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((blocks * LANES, LANES), jnp.float32),
            *_ring(values, places),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=dispatch.interpreted(),
        name="slot_dot",
    )(_tiled(slot_ids, tile), vectors, values)
    output = output.reshape(tiles, -1)[:, : tile * places]
    return output.reshape(tiles * tile, places)[:tokens]


def _stream_rows(slot_ids, values, ring, sems, *, tokens, places, use):
    """Calls `use(token, rows)` for every token of a tile; its rows are copied ahead of time."""
    depth = ring.shape[0]

    def start(token):
        buffer = token % depth

        @pl.loop(0, places, unroll=8 if places % 8 == 0 else 1)
        def _(p):
            source = values.at[pl.ds(slot_ids[0, 0, token * places + p], 1)]
            target = ring.at[buffer, pl.ds(p, 1)]
            pltpu.make_async_copy(source, target, sems.at[buffer]).start()

    pl.loop(0, min(depth, tokens))(start)

    @pl.loop(0, tokens)
    def _(token):
        buffer = token % depth
        rows = ring.at[buffer]
        # A semaphore counts bytes, so one wait covers all copies of the token.
        pltpu.make_async_copy(rows, rows, sems.at[buffer]).wait()
        use(token, rows)
        # The buffer is free again: it takes the rows of the token one ring ahead.
        pl.when(token + depth < tokens)(lambda: start(token + depth))


def _ring(values: jax.Array, places: int) -> list:
    depth = min(max(2, RING // places), 128)  # A core has few semaphores.
    return [
        pltpu.VMEM((depth, places, values.shape[1]), values.dtype),
        pltpu.SemaphoreType.DMA((depth,)),
    ]


def _tile(tokens: int, places: int) -> int:
    """Tokens per tile: as many as the memories hold; a multiple of 8, or all tokens."""
    most = max(8, min(TOKENS, REFERENCES // places) // 8 * 8)
    return min(tokens, most)


def _tiled(x: jax.Array, tile: int) -> jax.Array:
    """`[tokens, n]` to `[tiles, 1, tile * n]`, padded with zeros."""
    tokens, n = x.shape
    x = jnp.pad(x, [(0, -tokens % tile), (0, 0)])
    return x.reshape(-1, 1, tile * n)
