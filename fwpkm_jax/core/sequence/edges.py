"""The tokens right before a device's part, for convolutions and windows."""

from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.core.sequence.axis import SequenceAxis


def tokens_before(tree: Any, first: Any, *, axis: SequenceAxis) -> Any:
    """The last tokens before this device's part, as many as `first` has, oldest first.

    Each device sends only these tokens, whatever the length of its part. Where a part is shorter,
    the parts before it send theirs, too.

    Args:
      tree: the part, leaves `[batch, length, ...]`.
      first: what comes before the whole sequence, leaves `[batch, width, ...]`, equal on all
        devices.
      axis: over which the sequence lies.
    """
    return jax.tree.map(lambda x, before: _tokens_before(x, before, axis), tree, first)


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
