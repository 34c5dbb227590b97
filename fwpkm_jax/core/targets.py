"""What a memory is asked to predict, and which tokens write: one rule, `pair_weights`.

Where documents end, `layers.memories.documents` and `core.streams` take further pairs out.

A token writes if it and the token that holds its target are real, and the target is known when the
token's chunk is written. When that is depends on how the memory is read:

- A pass over whole sequences (`write_weights`) writes a chunk right after its last token. The last
  `lookahead` tokens of a chunk have their targets in the next one, so they do not write.
- A stream (`core.streams`) writes a chunk `lookahead` tokens later, when all its targets are known.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from fwpkm_jax.core.array_types import TokenMask


class WriteWeights(NamedTuple):
    """What each token contributes to a write, `[batch, length]` each.

    Attributes:
      write: weight of the token's squared error in the memory loss; a token with 0 is not written.
      paired: 1 where a target exists `lookahead` tokens on in the same chunk.
      counted: 1 for real tokens, 0 for padding.
    """

    write: Float[Array, "batch length"]
    paired: Float[Array, "batch length"]
    counted: Float[Array, "batch length"]


Pairing = Callable[..., Any]
"""A function like `write_weights`. What it returns has the fields of `WriteWeights`, and may have
more that a rule's `chunk` takes."""


def pair_weights(
    gate: Float[Array, "batch length"],
    real: Float[Array, "batch length"],
    *,
    known: Float[Array, "batch length"],
    lookahead: int,
) -> WriteWeights:
    """The weights of tokens whose target is `lookahead` tokens further on.

    Args:
      real: 1 for real tokens, 0 for padding; of the tokens that hold targets, too.
      known: 1 where the target is known when the token's chunk is written.
      lookahead: distance from a token to its target.
    """
    # Both ends of a pair must be real: its token, and the token that holds its target.
    write = gate * known * real * shift_left(real, lookahead)
    return WriteWeights(write=write, paired=known, counted=real)


def write_weights(
    gate: Float[Array, "batch length"],
    mask: TokenMask | None,
    *,
    chunk_size: int,
    lookahead: int,
) -> WriteWeights:
    """The write weights of whole sequences, each chunk written right after its last token.

    A token writes if it and the token `lookahead` further on, in the same chunk, are both real.

    Args:
      mask: 1 for real tokens, 0 for padding; None: all real.
      chunk_size: tokens between two writes; the last chunk may be shorter.
      lookahead: distance from a token to its target.
    """
    length = gate.shape[1]
    real = jnp.ones_like(gate) if mask is None else mask.astype(gate.dtype)
    position = jnp.arange(length)
    chunk_end = jnp.minimum((position // chunk_size + 1) * chunk_size, length)
    # A target behind the chunk is not known when the chunk is written.
    known = jnp.broadcast_to(position + lookahead < chunk_end, gate.shape)
    return pair_weights(gate, real, known=known.astype(gate.dtype), lookahead=lookahead)


def shift_left(x: Num[Array, "batch length *rest"], lookahead: int) -> Array:
    """`x[:, t + lookahead]` at t, zeros behind the end."""
    if lookahead == 0:
        return x
    padding = [(0, 0), (0, lookahead)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding)[:, lookahead:]
