"""TPU: one kernel forward and one backward; each walks over the chunks with the memory in VMEM.

All work of a chunk is fused: decays, the inverse of the triangular matrix, the written errors,
output and memory. Arguments are read once and results are written once. The backward pass also
reads the memories at the chunks' starts and the inverses, which are as large as the values and
keys. Chunks are the last grid axis, which is sequential. The block that holds the memory has the
same index for every chunk, so it stays in VMEM until the heads change.

Several heads share a block, side by side along the lanes, so `[batch, length, heads, width]` needs
no transposed copy. Two heads at a time share all tiles, `[64, 2 * width]`: heads of 64 fill a unit
of 128 x 128 and the lanes of a vector, and what is kept for the backward pass is stored without
gaps. The products of a block's groups of heads do not depend on each other and fill the gaps in
each other's latency. `vmap` over the groups puts the same operation of all groups side by side: the
compiler does not bring together what is far apart.

A float32 product takes six passes through the unit. For arguments in bfloat16 operands are rounded
to it, as on a GPU, and a product takes one; the inverse and sums of decays take two or three.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import interpreted
from pallas_kernels.gated_delta.arguments import CHUNK, Inputs, Residuals, Saved
from pallas_kernels.gated_delta.chunk import chunk_forward
from pallas_kernels.gated_delta.chunk_gradients import chunk_backward
from pallas_kernels.gated_delta.tpu_blocks import Blocks


def forward(
    *inputs: jax.Array, scale: float, save: bool
) -> tuple[tuple[jax.Array, jax.Array], Saved | None]:
    """Output `[batch, length, heads, value]` with the final memory, and what `backward` reads."""
    given = Inputs(*inputs)
    shape = Blocks.of(given)
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    out_shape = [
        float32((shape.batch, shape.length, shape.heads * shape.value)),
        jax.eval_shape(shape.arrange_memory, given.state),
    ]
    out_specs = [shape.tokens(shape.value), shape.memory()]
    if save:
        out_shape += [
            float32(shape.tiles_shape(shape.key, shape.value)),
            float32(shape.tiles_shape(CHUNK, CHUNK)),
        ]
        out_specs += [shape.tiles(shape.key, shape.value), shape.tiles(CHUNK, CHUNK)]
    output, state, *residuals = _call(
        functools.partial(_forward_kernel, shape=shape, scale=scale),
        shape,
        in_specs=shape.input_specs(),
        out_specs=out_specs,
        out_shape=out_shape,
        name="gated_delta_forward",
    )(*shape.arrange(given))
    saved = Saved(given, Residuals(*residuals)) if save else None
    return (output.reshape(given.value.shape), shape.restore_memory(state)), saved


def backward(saved: Saved, cotangents: tuple[jax.Array, jax.Array], *, scale: float) -> Inputs:
    """Cotangents of the inputs, in the inputs' dtypes, from those of output and final memory."""
    inputs, residuals = saved
    d_output, d_state = cotangents
    shape = Blocks.of(inputs, reverse=True)
    arranged = shape.arrange(inputs)
    query, key, value, log_decay, beta, _ = arranged
    results = _call(
        functools.partial(_backward_kernel, shape=shape, scale=scale),
        shape,
        in_specs=[
            *shape.input_specs()[:-1],
            shape.tiles(shape.key, shape.value),
            shape.tiles(CHUNK, CHUNK),
            shape.tokens(shape.value),
            shape.memory(),
        ],
        out_specs=shape.input_specs(),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arranged],
        name="gated_delta_backward",
    )(
        query,
        key,
        value,
        log_decay,
        beta,
        residuals.states,
        residuals.inverses,
        d_output.reshape(d_output.shape[0], d_output.shape[1], -1),
        shape.arrange_memory(d_state),
    )
    return shape.restore(inputs, results)


def _forward_kernel(
    query, key, value, log_decay, beta, start, output, state, *residuals, shape, scale
):
    @pl.when(pl.program_id(2) == 0)
    def _():
        # The block stays in VMEM over all chunks, so that it is the memory they update.
        state[...] = start[...]

    def forward(*arrays: jax.Array):
        return chunk_forward(*arrays, side=shape.side, scale=scale)

    before = state[0]
    of_chunk = shape.of_chunk(query, key, value, log_decay, beta)
    read, after, inverse = jax.vmap(forward)(*of_chunk, before)
    shape.join(output, read)
    state[0] = after
    for residual, saved in zip(residuals, (before, inverse), strict=False):
        residual[0, 0] = saved


def _backward_kernel(*refs, shape, scale):
    query, key, value, log_decay, beta, states, inverses, d_output, d_end = refs[:9]
    d_query, d_key, d_value, d_log_decay, d_beta, d_state = refs[9:]

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_state[...] = d_end[...]

    def backward(*arrays: jax.Array):
        inputs = Inputs(*arrays[:6])
        return chunk_backward(inputs, *arrays[6:], side=shape.side, scale=scale)

    of_chunk = shape.of_chunk(query, key, value, log_decay, beta)
    saved = states[0, 0], inverses[0, 0]
    gradients = jax.vmap(backward)(*of_chunk, *saved, shape.split(d_output[0]), d_state[0])
    for ref, gradient in zip((d_query, d_key, d_value), gradients[:3], strict=True):
        shape.join(ref, gradient)
    # Without the axis of the one row that a vector is in a tile.
    d_log_decay[0, 0, 0] = gradients.log_decay[:, 0]
    d_beta[0, 0, 0] = gradients.beta[:, 0]
    d_state[0] = gradients.state


def _call(kernel, shape: Blocks, *, in_specs, out_specs, out_shape, name):
    return pl.pallas_call(
        kernel,
        grid=shape.grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpreted(),
        name=name,
    )
