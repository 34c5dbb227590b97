"""One chunk of the gated delta rule for heads side by side, on the tiles inside the kernels.

For tiles, rows and columns see `tiles`; shapes here are those of one head, whose last axis is as
many times as long for several heads. The letters are those of docs/explanation/math.md.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.tiles import ALONE, Columns, SideBySide, each, mask, wide


class Decays(NamedTuple):
    """Products of the decays within one chunk."""

    to_token: Columns
    """`[chunk, 1]`: from the chunk's start up to and including each token (gamma)."""
    to_end: Columns
    """`[chunk, 1]`: from after each token to the chunk's end (delta)."""
    whole: Columns
    """`[1, 1]`: of the whole chunk."""
    between: jax.Array
    """`[chunk, chunk]`: from after token s to token r, zero where r < s (Gamma)."""


class Written(NamedTuple):
    """Arrays that the forward and the backward pass compute from the memory at a chunk's start."""

    own_error: jax.Array
    """`[chunk, value]`: value minus what the memory at the chunk's start holds for the key (R)."""
    recalled: jax.Array
    """`[chunk, value]`: that memory read with the keys, before decay (H)."""
    errors: jax.Array
    """`[chunk, value]`: the written errors, which account for earlier writes in the chunk (W)."""


def chunk_decays(log_decay: jax.Array, side: SideBySide = ALONE) -> Decays:
    """All decays of a chunk from `log_decay [1, chunk]`.

    Each decay is the exponential of a sum over exactly the tokens that it spans. A difference of
    two running sums would lose its digits after one strong decay.
    """
    row, column = side.positions(log_decay.shape[1] // side.heads)
    until = jnp.where(column <= row, log_decay, 0.0)  # [r, t]: t <= r
    between = mask(row > column, until).astype(jnp.bfloat16 if side.rounded else until.dtype)
    spans = side.careful_product(until, between, terms=3)  # [r, s]: sum over s < t <= r
    after = jnp.where(column > row, log_decay, 0.0)  # [s, t]: t > s
    return Decays(
        to_token=each(jnp.exp, side.sums(until)),
        to_end=each(jnp.exp, side.sums(after)),
        whole=each(jnp.exp, side.sums(log_decay)),
        between=jnp.where(column <= row, jnp.exp(spans), 0.0),
    )


def write_inverse(overlap: jax.Array, beta: Columns, decays: Decays, side: SideBySide) -> jax.Array:
    """`(I + tril(beta * overlap * between, -1))^-1`, by products of whole tiles only.

    Works like `core.recurrence.triangular.unit_lower_inverse`: with X the inverse of the diagonal
    blocks and C the entries that join two neighbours into a block of twice the size, `X - X C X` is
    the inverse of the larger blocks. A mask selects the entries of C, so that tiles stay whole.

    Args:
      overlap: `[chunk, chunk]`, keys times keys; chunk is a power of two.
      beta: `[chunk, 1]`.
      side: the heads that the tiles hold.
    """
    size = overlap.shape[0]
    row, column = side.positions(size)
    lower = jnp.where(row > column, side.scale(beta, overlap * decays.between), 0.0)
    inverse = mask(row == column, lower)
    # `joining`: row and column are in the same pair of blocks but in different blocks.
    apart = row ^ column
    for block in (2**power for power in range((size - 1).bit_length())):
        joining = jnp.where((apart >= block) & (apart < 2 * block), lower, 0.0)
        if block == 1:
            inverse = inverse - joining  # X is the identity.
        else:
            joined = side.careful_product(joining, inverse)
            inverse = inverse - side.careful_product(inverse, joined)
    return inverse


def chunk_written(
    key: jax.Array,
    value: jax.Array,
    beta: Columns,
    decays: Decays,
    inverse: jax.Array,
    state: jax.Array,
    side: SideBySide,
) -> Written:
    """The errors that the chunk writes, given the memory at its start."""
    key, value = wide(key, value)
    recalled = side.product(key, state)
    own_error = value - side.scale(decays.to_token, recalled)
    return Written(own_error, recalled, side.product(inverse, side.scale(beta, own_error)))


def chunk_read(
    query: jax.Array,
    key: jax.Array,
    decays: Decays,
    state: jax.Array,
    errors: jax.Array,
    side: SideBySide,
    *,
    scale: float,
) -> jax.Array:
    """The chunk's reads `[chunk, value]`, from the memory before it and from its own writes."""
    attention = scale * side.product(query, key, contract=(1, 1)) * decays.between
    (query,) = wide(query)
    from_start = side.scale(decays.to_token, side.product(query, state))
    return scale * from_start + side.product(attention, errors)


def chunk_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    side: SideBySide = ALONE,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads and writes one chunk.

    Args:
      query: `[chunk, key]`, float32 or bfloat16.
      key: `[chunk, key]`.
      value: `[chunk, value]`.
      log_decay: `[1, chunk]` float32.
      beta: `[1, chunk]` float32.
      state: `[key, value]` float32, the memory before the chunk.
      side: the heads that the arrays hold.

    Returns:
      Output `[chunk, value]`, the memory after the chunk, and the inverse `[chunk, chunk]`, which
      is kept for the backward pass.
    """
    decays, betas = chunk_decays(log_decay, side), side.columns(beta)
    inverse = write_inverse(side.product(key, key, contract=(1, 1)), betas, decays, side)
    errors = chunk_written(key, value, betas, decays, inverse, state, side).errors
    output = chunk_read(query, key, decays, state, errors, side, scale=scale)
    (key,) = wide(key)
    written = side.product(side.scale(decays.to_end, key), errors, contract=(0, 0))
    return output, side.scale(decays.whole, state) + written, inverse
