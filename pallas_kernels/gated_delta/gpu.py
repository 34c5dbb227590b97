"""GPU (Hopper): parallel stages before and after the walk from chunk to chunk.

A GPU has more processors than a batch has memories. So only the walk (`gpu_walk`), with two
products per chunk, is sequential. The other stages are parallel, with one program for each chunk of
each head: what the walks read (`gpu_prepare`), the output (`gpu_read`) and the cotangents
(`gpu_after_walk`). The backward pass walks the transposed recurrence to find the
memory's cotangent after every chunk. All stages are Mosaic GPU kernels; XLA only computes vectors
with one number per token.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.arguments import CHUNK, Inputs, Residuals, Saved, Vectors
from pallas_kernels.gated_delta.chunk import chunk_decays
from pallas_kernels.gated_delta.gpu_after_walk import after_walk
from pallas_kernels.gated_delta.gpu_chunk import span_sums
from pallas_kernels.gated_delta.gpu_prepare import before_walk, prepare
from pallas_kernels.gated_delta.gpu_read import read
from pallas_kernels.gated_delta.gpu_tiles import Halves
from pallas_kernels.gated_delta.gpu_walk import walk

HIGHEST = jax.lax.Precision.HIGHEST


def forward(
    *inputs: jax.Array, scale: float, save: bool
) -> tuple[tuple[jax.Array, jax.Array], Saved | None]:
    """Output `[batch, length, heads, value]` with the final memory, and what `backward` reads."""
    query, key, value, log_decay, beta, start = Inputs(*inputs)
    vectors, whole = _vectors(log_decay, beta)
    prepared = prepare(key, value, _tokens_to_chunks(log_decay), vectors)
    factors = prepared.recall, _halves(key), vectors.to_end, whole
    states, final = walk(prepared.own, *factors, start, None, reverse=False)
    residuals = Residuals(states, prepared.inverse)
    output = read(query, key, value, vectors, residuals, scale=scale)
    saved = Saved(Inputs(*inputs), residuals) if save else None
    return (output.astype(jnp.float32), final), saved


def backward(saved: Saved, cotangents: tuple[jax.Array, jax.Array], *, scale: float) -> Inputs:
    """Cotangents of the inputs, in the inputs' dtypes, from those of output and final memory."""
    (query, key, value, log_decay, beta, _), residuals = saved
    d_output, d_state = cotangents
    vectors, whole = _vectors(log_decay, beta)
    d_output = d_output.astype(key.dtype)
    before = before_walk(query, key, vectors, residuals.inverses, d_output, scale=scale)
    factors = before.recall, _halves(key), vectors.to_end, whole
    d_after, d_start = walk(before.d_errors, *factors, d_state, before.step, reverse=True)
    found = after_walk(query, key, value, vectors, residuals, d_output, d_after, scale=scale)
    # A token's log decay is part of three kinds of decay: from the start to this or a later token,
    # from an earlier token to the end, and of the whole chunk.
    later = jnp.tril(jnp.ones((CHUNK, CHUNK), jnp.float32))  # [r, t]: r >= t
    d_log_decay = (
        found.log_spans
        + jnp.einsum("...r,rt->...t", found.log_to_token, later, precision=HIGHEST)
        + jnp.einsum("...s,ts->...t", found.log_to_end, jnp.tril(later, -1), precision=HIGHEST)
        + (whole * _inner(d_after, residuals.states))[..., None]
    )
    return Inputs(*found[:3], _to_length(d_log_decay), _to_length(found.beta), d_start)


def _halves(x: jax.Array) -> Halves:
    """An array of GPU memory as operands of products, like `gpu_tiles.split`."""
    if x.dtype == jnp.bfloat16:
        return Halves(x)
    # XLA leaves out a conversion to bfloat16 and back.
    rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return Halves(rounded.astype(jnp.bfloat16), (x - rounded).astype(jnp.bfloat16))


def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums of the products of two arrays of memories."""
    return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=(-1, -2))


def _vectors(log_decay: jax.Array, beta: jax.Array) -> tuple[Vectors, jax.Array]:
    """The vectors of every chunk, and the decay of the whole chunk `[batch, chunks, heads]`."""
    log_decay, beta = (_tokens_to_chunks(x) for x in (log_decay, beta))
    decays = jax.vmap(jax.vmap(jax.vmap(chunk_decays)))(log_decay[..., None, :])
    to_token, to_end, whole = (x[..., 0] for (x,) in decays[:3])
    return Vectors(span_sums(log_decay), beta, to_token, to_end), whole[..., 0]


def _tokens_to_chunks(x: jax.Array) -> jax.Array:
    """`[batch, length, heads, ...]` as `[batch, chunks, heads, chunk, ...]`."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 2, 3)


def _to_length(x: jax.Array) -> jax.Array:
    """The inverse of `_tokens_to_chunks`."""
    x = jnp.swapaxes(x, 2, 3)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
