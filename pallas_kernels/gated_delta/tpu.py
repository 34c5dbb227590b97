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
each other's latency.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import interpreted
from pallas_kernels.gated_delta.arguments import CHUNK, Inputs, Residuals
from pallas_kernels.gated_delta.chunk import chunk_forward
from pallas_kernels.gated_delta.chunk_gradients import chunk_backward
from pallas_kernels.gated_delta.tpu_blocks import Blocks


def forward(
    inputs: Inputs, *, scale: float, save: bool
) -> tuple[jax.Array, jax.Array, Residuals | None]:
    """Output `[batch, length, heads, value]`, final memory, and residuals (None unless `save`)."""
    shape = Blocks.of(inputs)
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    out_shape = [
        float32((shape.batch, shape.length, shape.heads * shape.value)),
        jax.eval_shape(shape.arrange_memory, inputs.state),
    ]
    out_specs = [shape.tokens(shape.value), shape.memory()]
    if save:
        out_shape += [
            float32(shape.tiles_shape(shape.key, shape.value)),
            float32(shape.tiles_shape(CHUNK, CHUNK)),
        ]
        out_specs += [shape.tiles(shape.key, shape.value), shape.tiles(CHUNK, CHUNK)]
    output, state, *saved = _call(
        functools.partial(_forward_kernel, shape=shape, scale=scale),
        shape,
        in_specs=shape.input_specs(),
        out_specs=out_specs,
        out_shape=out_shape,
    )(*shape.arrange(inputs))
    residuals = Residuals(*saved) if save else None
    return output.reshape(inputs.value.shape), shape.restore_memory(state), residuals


def backward(
    inputs: Inputs,
    residuals: Residuals,
    d_output: jax.Array,
    d_state: jax.Array,
    *,
    scale: float,
) -> Inputs:
    """Cotangents of the inputs, in the inputs' dtypes, from those of output and final memory."""
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
        state[...] = start[...]

    for group in range(shape.groups):
        keys, values = shape.lanes(shape.key, group), shape.lanes(shape.value, group)
        before = state[0, group]
        read, after, inverse = chunk_forward(
            query[0, :, keys],
            key[0, :, keys],
            value[0, :, values],
            log_decay[0, 0, 0, group : group + 1],
            beta[0, 0, 0, group : group + 1],
            before,
            shape.side,
            scale=scale,
        )
        output[0, :, values] = read
        state[0, group] = after
        for residual, saved in zip(residuals, (before, inverse), strict=False):
            residual[0, 0, group] = saved


def _backward_kernel(*refs, shape, scale):
    query, key, value, log_decay, beta, states, inverses, d_output, d_end = refs[:9]
    d_query, d_key, d_value, d_log_decay, d_beta, d_state = refs[9:]

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_state[...] = d_end[...]

    for group in range(shape.groups):
        keys, values = shape.lanes(shape.key, group), shape.lanes(shape.value, group)
        gradients = chunk_backward(
            query[0, :, keys],
            key[0, :, keys],
            value[0, :, values],
            log_decay[0, 0, 0, group : group + 1],
            beta[0, 0, 0, group : group + 1],
            states[0, 0, group],
            inverses[0, 0, group],
            d_output[0, :, values],
            d_state[0, group],
            shape.side,
            scale=scale,
        )
        d_query[0, :, keys] = gradients.query.astype(d_query.dtype)
        d_key[0, :, keys] = gradients.key.astype(d_key.dtype)
        d_value[0, :, values] = gradients.value.astype(d_value.dtype)
        d_log_decay[0, 0, 0, group : group + 1] = gradients.log_decay
        d_beta[0, 0, 0, group : group + 1] = gradients.beta
        d_state[0, group] = gradients.state


def _call(kernel, shape: Blocks, *, in_specs, out_specs, out_shape):
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
    )
