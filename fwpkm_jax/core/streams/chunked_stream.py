"""Pieces of a stream in parallel, cut where the chunks of each sequence end."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Cache = TypeVar("Cache")
Within = Callable[[jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]


def stream_in_chunks(
    within: Within,
    x: Float[Array, "batch length model"],
    real: Bool[Array, "batch length"],
    cache: Cache,
    *,
    position: Int[Array, " batch"],
    chunk: int,
) -> tuple[Float[Array, "batch length model"], Cache]:
    """Reads a piece of a stream, chunk by chunk of each sequence.

    Sequences of a batch may stand at different places of their chunks, as padding leaves them: each
    has its own cuts.

    Args:
      within: from tokens (those that are real first), which of them are real, and the cache to
        their outputs and the cache after them; called with tokens of one chunk.
      x: the piece, real tokens first.
      real: which tokens are.
      cache: of the tokens before.
      position: tokens read so far.
      chunk: tokens per chunk.
    """
    batch, length = real.shape
    if length == 1:
        return within(x, real, cache)
    width, number = min(chunk, length), -(-(chunk - 1 + length) // chunk)
    offset, count = position % chunk, jnp.sum(real, axis=1, dtype=jnp.int32)
    steps = jnp.arange(width, dtype=jnp.int32)[None]

    def read(cache: Cache, index: jax.Array) -> tuple[Cache, jax.Array]:
        """The tokens of each sequence's chunk of this index."""
        end = (index + 1) * chunk - offset
        at = jnp.maximum(end - chunk, 0)[:, None] + steps
        own = at < jnp.minimum(end, count)[:, None]
        rows = jnp.take_along_axis(x, jnp.where(own, at, 0)[:, :, None], axis=1)

        def skip() -> tuple[jax.Array, Cache]:
            return jnp.zeros(rows.shape, x.dtype), cache

        y, cache = jax.lax.cond(jnp.any(own), lambda: within(rows, own, cache), skip)
        return cache, y

    cache, read_out = jax.lax.scan(read, cache, jnp.arange(number, dtype=jnp.int32))
    joined = jnp.moveaxis(read_out, 0, 1).reshape(batch, number * width, -1)
    token = jnp.arange(length, dtype=jnp.int32)[None]
    index = (token + offset[:, None]) // chunk
    step = token - jnp.maximum(index * chunk - offset[:, None], 0)
    return jnp.take_along_axis(joined, (index * width + step)[:, :, None], axis=1), cache


def read_in_chunks(
    within: Within,
    x: Float[Array, "batch length model"],
    real: Bool[Array, "batch length"],
    cache: Cache,
    *,
    chunk: int,
) -> tuple[Float[Array, "batch length model"], Cache]:
    """`stream_in_chunks` from the first token on; a backward pass computes each chunk again."""
    batch, length = real.shape
    number, width = -(-length // chunk), min(chunk, length)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, number * width - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, number, width, *x.shape[2:]), 1, 0)

    within = jax.checkpoint(within)

    def read(cache: Cache, piece: tuple[jax.Array, jax.Array]) -> tuple[Cache, jax.Array]:
        y, cache = within(*piece, cache)
        return cache, y

    cache, out = jax.lax.scan(read, cache, (split(x), split(real)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, number * width, -1)[:, :length], cache
