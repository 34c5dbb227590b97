"""Reads the tokens of rows chunk by chunk: whole sequences, streams, and rows of documents."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.padding import Packing
from fwpkm_jax.core.streams.cuts import Within, in_chunks
from fwpkm_jax.core.streams.documents import UnitSize, in_documents
from fwpkm_jax.layers.mixers.base import Starts

_NARROWED = 32  # Shorter chunks are read at their whole width wherever a document ends in them.


def real_tokens(
    x: Float[Array, "batch length model"], packing: Packing | None
) -> Int[Array, " batch"]:
    """How many of the packed tokens are real."""
    return jnp.full(x.shape[:1], x.shape[1], jnp.int32) if packing is None else packing.counts


def in_pieces(
    advance: Within[Any],
    x: Float[Array, "batch length model"],
    cache: Any,
    fresh: Callable[[], Any],
    *,
    count: Int[Array, " batch"],
    starts: Starts,
    chunk: int,
    position: Int[Array, " batch"] | None,
    read: int = 0,
) -> tuple[Float[Array, "batch length model"], Any]:
    """The outputs of tokens that are read chunk by chunk, and the new cache, None without one.

    Args:
      advance: reads a piece of one chunk, see `core.streams.cuts.in_chunks`.
      x: real tokens first.
      cache: of the tokens before; None: `fresh`.
      fresh: makes the cache before each document.
      count: how many of each sequence are real.
      starts: first tokens of documents; None: a sequence is one document.
      position: tokens that the cache's document has read; None without a cache.
      read: tokens that stand before each document.
    """
    options: dict[str, Any] = {"count": count, "position": position}
    start = fresh() if cache is None else cache
    if starts is None:
        # A backward pass computes each chunk again.
        after, y = in_chunks(jax.checkpoint(advance), start, x[:, None], chunk=chunk, **options)
    else:
        # A document that ends in a chunk's first half is read at half its width: the cost of a
        # chunk's writes grows with the square of its width.
        narrow = chunk // 2 if chunk >= _NARROWED else None
        unit = UnitSize(chunk, lead=-(read % chunk), narrow=narrow)
        # Without a cache the row itself begins with a document.
        first = start if cache is None else fresh()
        after, y = in_documents(
            advance, start, first, x[:, None], starts=starts, unit=unit, **options
        )
    return y[:, 0], None if cache is None else after
