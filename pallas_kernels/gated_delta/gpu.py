"""GPU (Hopper): a parallel stage, the walk from chunk to chunk, and another parallel stage.

A GPU has more processors than a batch has memories, so only what must be sequential is: the walk
(`gpu_walk`), a Mosaic GPU kernel, one chunk's two products at a time. What a chunk needs before and
after it, decays, the triangle's inverse, outputs and the arguments' cotangents, depends on no other
chunk; those stages are batched products over all chunks at once, left to XLA. The backward pass
walks the transposed recurrence to find the memory's cotangent after every chunk, then has all else
from `chunk_backward`, chunk by chunk in parallel.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.arguments import CHUNK, Inputs, Residuals
from pallas_kernels.gated_delta.chunk import (
    as_column,
    chunk_backward,
    chunk_decays,
    product,
)
from pallas_kernels.gated_delta.gpu_prepare import prepare
from pallas_kernels.gated_delta.gpu_read import read
from pallas_kernels.gated_delta.gpu_tiles import halves_of
from pallas_kernels.gated_delta.gpu_walk import walk


def forward(
    inputs: Inputs, *, scale: float, save: bool
) -> tuple[jax.Array, jax.Array, Residuals | None]:
    """Output `[batch, length, heads, value]`, final memory, and residuals if `save`."""
    query, key, value, log_decay, beta, start = inputs
    log_decay, beta = (_tokens_to_chunks(x) for x in (log_decay, beta))
    decays = _each_chunk(chunk_decays)(log_decay[..., None, :])
    to_token, to_end = decays.to_token[..., 0], decays.to_end[..., 0]
    prepared = prepare(key, value, log_decay, beta, to_token, to_end)
    whole = decays.whole[..., 0, 0]
    states, final = walk(
        prepared.own, prepared.left, prepared.right, whole, start, None, reverse=False
    )
    residuals = Residuals(states, prepared.inverse)
    output = read(query, key, value, log_decay, beta, to_token, residuals, scale=scale)
    return output, final, residuals if save else None


def backward(
    inputs: Inputs,
    residuals: Residuals,
    d_output: jax.Array,
    d_state: jax.Array,
    *,
    scale: float,
) -> Inputs:
    """Cotangents of the inputs, in their dtypes, from those of output and final memory."""
    query, key, value, log_decay, beta = (_tokens_to_chunks(x) for x in inputs[:-1])
    log_decay, beta = (x[..., None, :] for x in (log_decay, beta))
    states, inverse = residuals
    d_read = _tokens_to_chunks(d_output)
    left, right, whole = _each_chunk(_recurrence)(key, log_decay, beta, inverse)
    of_output = functools.partial(_cotangents_of_read, scale=scale)
    d_errors, step = _each_chunk(of_output)(query, key, log_decay, d_read)
    d_after, d_start = walk(
        d_errors, halves_of(right), halves_of(left), whole, d_state, step, reverse=True
    )
    of_chunk = functools.partial(chunk_backward, scale=scale)
    gradients = _each_chunk(of_chunk)(
        query, key, value, log_decay, beta, states, inverse, d_read, d_after
    )
    results = Inputs(
        *(_to_length(x) for x in gradients[:3]),
        *(_to_length(x[..., 0, :]) for x in gradients[3:5]),
        d_start,
    )
    return Inputs(*(x.astype(y.dtype) for x, y in zip(results, inputs, strict=True)))


def _recurrence(key, log_decay, beta, inverse):
    """What the walk multiplies by: `-Y`, keys decayed to the chunk's end, the whole decay."""
    decays, beta = chunk_decays(log_decay), as_column(beta)
    key = key.astype(jnp.float32)
    from_state = product(inverse, (beta * decays.to_token) * key)
    return -from_state, decays.to_end * key, decays.whole[0, 0]


def _cotangents_of_read(query, key, log_decay, d_read, *, scale):
    """What a chunk's output adds to the cotangents of its errors and of the memory before it."""
    decays = chunk_decays(log_decay)
    attention = scale * product(query, key, contract=(1, 1)) * decays.between
    query = (scale * decays.to_token) * query.astype(jnp.float32)
    return (
        product(attention, d_read, contract=(0, 0)),
        product(query, d_read, contract=(0, 0)),
    )


def _each_chunk(of_one: Callable) -> Callable:
    """A function of one head's chunk, over `[batch, chunks, heads]`."""
    return jax.vmap(jax.vmap(jax.vmap(of_one)))


def _tokens_to_chunks(x: jax.Array) -> jax.Array:
    """`[batch, length, heads, ...]` as `[batch, chunks, heads, chunk, ...]`."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 2, 3)


def _to_length(x: jax.Array) -> jax.Array:
    """The inverse of `_tokens_to_chunks`."""
    x = jnp.swapaxes(x, 2, 3)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
