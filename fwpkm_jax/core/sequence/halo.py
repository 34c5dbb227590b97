"""The tokens right before a device's part, for convolutions and windows."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fwpkm_jax.core.padding import last_rows
from fwpkm_jax.core.sequence.axis import SequenceAxis


def halo_exchange(
    tree: Any, first: Any, *, axis: SequenceAxis, counts: Int[Array, " batch"] | None = None
) -> Any:
    """The last tokens before this device's part, as many as `first` has, oldest first.

    Each device sends only these tokens, whatever the length of its part. Where a part is shorter,
    the parts before it send theirs, too; with `counts`, each part sends its last tokens to all.

    Args:
      tree: the part, leaves `[batch, length, ...]`.
      first: what comes before the whole sequence, leaves `[batch, width, ...]`, equal on all
        devices.
      counts: real tokens of this part, which come first; None: all are real.
    """
    if counts is not None:
        return jax.tree.map(
            lambda x, before: _real_tokens_before(x, before, axis, counts), tree, first
        )
    return jax.tree.map(lambda x, before: _tokens_before(x, before, axis), tree, first)


def _real_tokens_before(
    x: jax.Array, first: jax.Array, axis: SequenceAxis, counts: jax.Array
) -> jax.Array:
    """`_tokens_before` of parts of different lengths."""
    length, width = x.shape[1], first.shape[1]
    if width == 0:
        return first
    size = min(length, width)
    end = jnp.pad(x, [(0, 0), (size, 0)] + [(0, 0)] * (x.ndim - 2))
    end = last_rows(end, size=size, end=size + counts)
    ends = jnp.moveaxis(jax.lax.all_gather(end, axis.name), 0, 1)  # [batch, parts, size, ...]
    known = jnp.cumsum(jax.lax.all_gather(counts, axis.name), axis=0).T  # [batch, parts]
    rows = jnp.concatenate(
        [first.astype(x.dtype), ends.reshape(ends.shape[0], -1, *x.shape[2:])], axis=1
    )
    mine = axis.sum_before(counts)[:, None]
    wanted = mine - width + jnp.arange(width, dtype=mine.dtype)[None]  # Numbers of real tokens.
    part = jnp.sum(known[:, None] <= wanted[:, :, None], axis=-1)
    part = jnp.minimum(part, axis.size - 1)
    from_end = jnp.take_along_axis(known, part, axis=1) - wanted
    place = jnp.where(wanted < 0, width + wanted, width + (part + 1) * size - from_end)
    return jnp.take_along_axis(rows, jnp.expand_dims(place, tuple(range(2, x.ndim))), axis=1)


def _tokens_before(x: jax.Array, first: jax.Array, axis: SequenceAxis) -> jax.Array:
    length, width = x.shape[1], first.shape[1]
    if width == 0:
        return first
    hops = min(-(-width // length), axis.size - 1)
    pieces, wanted = [], width
    for hop in range(1, hops + 1):
        taken = min(wanted, length)
        pieces.insert(0, axis.shift(x[:, length - taken :], by=hop))
        wanted -= taken
    rest = jnp.zeros((x.shape[0], wanted, *x.shape[2:]), x.dtype)
    sent = jnp.concatenate([rest, *pieces], axis=1)
    # Where fewer than `width` tokens are in the parts before, `first` gives the others.
    known = axis.index * length
    padded = jnp.concatenate([first.astype(x.dtype), jnp.zeros_like(sent)], axis=1)
    older = jax.lax.dynamic_slice_in_dim(padded, jnp.minimum(known, width), width, axis=1)
    is_sent = jnp.arange(width) >= width - known
    return jnp.where(jnp.expand_dims(is_sent, (0, *range(2, x.ndim))), sent, older)
