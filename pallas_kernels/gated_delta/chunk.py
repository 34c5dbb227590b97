"""One chunk of the gated delta rule on one head's tiles, forward and backward.

These functions are the inside of the kernels: two-dimensional tiles, matrix products, sums
along an axis and masks, which is what lowers everywhere. A vector over the chunk's tokens is a
column `[chunk, 1]` or a row `[1, chunk]`. The derivation of the backward pass, and its letters, are
in docs/math.md.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fwpkm_jax.core.precision import compute_dtype


class Decays(NamedTuple):
    """Products of the decays within one chunk."""

    to_token: jax.Array
    """`[chunk, 1]`: from the chunk's start to each token, it included (gamma)."""
    to_end: jax.Array
    """`[chunk, 1]`: from after each token to the chunk's end (delta)."""
    whole: jax.Array
    """`[1, 1]`: of the whole chunk."""
    between: jax.Array
    """`[chunk, chunk]`: from after token s to token r, zero where r < s (Gamma)."""


class Written(NamedTuple):
    """What both passes need of a chunk once the memory at its start is known."""

    own_error: jax.Array
    """`[chunk, value]`: value minus what the memory at the chunk's start holds for the key (R)."""
    recalled: jax.Array
    """`[chunk, value]`: that memory read with the keys, before decay (H)."""
    errors: jax.Array
    """`[chunk, value]`: the errors written, each knowing the writes before it (W)."""


class ChunkGradients(NamedTuple):
    """Cotangents of a chunk's inputs and of the memory at its start."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    """`[1, chunk]`."""
    beta: jax.Array
    """`[1, chunk]`."""
    state: jax.Array


def product(a: jax.Array, b: jax.Array, *, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Sums `a` over axis `contract[0]` against `b` over axis `contract[1]`, in at least float32.

    Float32 operands are multiplied exactly enough (HIGHEST); bfloat16 operands are exact in one
    pass, because their products fit float32.
    """
    exact = a.dtype == b.dtype == jnp.bfloat16
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.DEFAULT if exact else jax.lax.Precision.HIGHEST,
        preferred_element_type=compute_dtype(a.dtype),
    )


def chunk_decays(log_decay: jax.Array) -> Decays:
    """All decays of a chunk from `log_decay [1, chunk]`.

    Each is the exponential of a sum over exactly the tokens it spans, never of a difference of two
    running sums: after one strong decay such a difference has lost its digits.
    """
    size = log_decay.shape[1]
    row, column = _positions(size)
    until = jnp.where(column <= row, log_decay, 0.0)  # [r, t]: t <= r
    spans = product(until, _mask(row > column, until))  # [r, s]: sum over s < t <= r
    after = jnp.where(column > row, log_decay, 0.0)  # [s, t]: t > s
    return Decays(
        to_token=jnp.exp(jnp.sum(until, axis=1, keepdims=True)),
        to_end=jnp.exp(jnp.sum(after, axis=1, keepdims=True)),
        whole=jnp.exp(jnp.sum(log_decay, axis=1, keepdims=True)),
        between=jnp.where(column <= row, jnp.exp(spans), 0.0),
    )


def write_inverse(overlap: jax.Array, beta: jax.Array, decays: Decays) -> jax.Array:
    """`(I + tril(beta * overlap * between, -1))^-1`, by products of whole tiles alone.

    As `core.triangular.unit_lower_inverse`: with X the inverse of the diagonal blocks and C the
    entries that join two neighbours into a block of twice the size, `X - X C X` is the inverse of
    the larger blocks. The entries of C are chosen by a mask, so that no tile is cut.

    Args:
      overlap: `[chunk, chunk]`, keys times keys; chunk is a power of two.
      beta: `[chunk, 1]`.
      decays: of the chunk.
    """
    size = overlap.shape[0]
    row, column = _positions(size)
    lower = jnp.where(row > column, beta * overlap * decays.between, 0.0)
    inverse = _mask(row == column, lower)
    # Row and column lie in one pair of blocks but not in one block.
    apart = row ^ column
    for block in (2**power for power in range((size - 1).bit_length())):
        joining = jnp.where((apart >= block) & (apart < 2 * block), lower, 0.0)
        if block == 1:
            inverse = inverse - joining  # X is the identity.
        else:
            inverse = inverse - product(inverse, product(joining, inverse))
    return inverse


def chunk_written(
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    decays: Decays,
    inverse: jax.Array,
    state: jax.Array,
) -> Written:
    """The errors that the chunk writes, given the memory at its start."""
    key, value = _wide(key, value)
    recalled = product(key, state)
    own_error = value - decays.to_token * recalled
    return Written(own_error, recalled, product(inverse, beta * own_error))


def chunk_read(
    query: jax.Array,
    key: jax.Array,
    decays: Decays,
    state: jax.Array,
    errors: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """What the chunk's queries read `[chunk, value]`: the memory before, and the writes since."""
    attention = scale * product(query, key, contract=(1, 1)) * decays.between
    (query,) = _wide(query)
    return (scale * decays.to_token) * product(query, state) + product(attention, errors)


def chunk_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
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
      state: `[key, value]` float32, the memory before.
      scale: factor on the queries.

    Returns:
      Output `[chunk, value]`, the memory after, and the inverse `[chunk, chunk]` that the backward
      pass would else compute again.
    """
    decays, beta = chunk_decays(log_decay), as_column(beta)
    inverse = write_inverse(product(key, key, contract=(1, 1)), beta, decays)
    errors = chunk_written(key, value, beta, decays, inverse, state).errors
    output = chunk_read(query, key, decays, state, errors, scale=scale)
    (key,) = _wide(key)
    state = decays.whole * state + product(decays.to_end * key, errors, contract=(0, 0))
    return output, state, inverse


def chunk_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    inverse: jax.Array,
    d_output: jax.Array,
    d_state: jax.Array,
    *,
    scale: float,
) -> ChunkGradients:
    """Cotangents of one chunk's inputs, given those of its output and of the memory after it.

    Args: as `chunk_forward`, then `inverse [chunk, chunk]` as it returned it, `d_output
      [chunk, value]` and `d_state [key, value]`, both float32.
    """
    decays, beta = chunk_decays(log_decay), as_column(beta)
    overlap = product(key, key, contract=(1, 1))
    scores = scale * product(query, key, contract=(1, 1))
    query, key, value = _wide(query, key, value)
    query = scale * query
    own_error, recalled, errors = chunk_written(key, value, beta, decays, inverse, state)
    row, column = _positions(overlap.shape[0])
    strict = row > column

    # The memory after: whole * S + (to_end * K)^T W.
    from_end = product(errors, d_state, contract=(1, 1))  # [chunk, key]
    d_errors = product(decays.to_end * key, d_state)
    d_key = decays.to_end * from_end
    d_log_to_end = decays.to_end * _row_sum(key * from_end)
    d_log_whole = decays.whole * jnp.sum(_row_sum(d_state * state), axis=0, keepdims=True)
    d_start = decays.whole * d_state

    # The output: to_token * Q S + (scores * between) W.
    from_output = product(d_output, state, contract=(1, 1))  # [chunk, key]
    d_query = decays.to_token * from_output
    d_log_to_token = decays.to_token * _row_sum(query * from_output)
    d_start += product(decays.to_token * query, d_output, contract=(0, 0))
    d_errors += product(scores * decays.between, d_output, contract=(0, 0))
    d_scores = product(d_output, errors, contract=(1, 1)) * decays.between
    d_log_between = d_scores * scores
    d_query += product(d_scores, key)
    d_key += product(d_scores, query, contract=(0, 0))

    # The errors: inverse times beta * R, R = V - to_token * K S.
    d_weighted = product(inverse, d_errors, contract=(0, 0))
    d_value = beta * d_weighted
    d_beta = _row_sum(d_weighted * own_error)
    d_recalled = -decays.to_token * d_value
    d_log_to_token += _row_sum(d_recalled * recalled)
    d_key += product(d_recalled, state, contract=(1, 1))
    d_start += product(key, d_recalled, contract=(0, 0))

    # The triangle inside the inverse: beta * overlap * between, below the diagonal.
    d_lower = jnp.where(strict, -product(d_weighted, errors, contract=(1, 1)), 0.0)
    d_lower *= decays.between
    d_beta += _row_sum(d_lower * overlap)
    d_overlap = beta * d_lower
    d_log_between += d_overlap * overlap
    d_key += product(d_overlap, key) + product(d_overlap, key, contract=(0, 0))

    # Each log decay takes part in every product that spans its token: again sums of exactly the
    # terms concerned, not differences of running sums.
    spanning = product(
        d_log_between, _mask(row >= column, d_log_between), contract=(0, 0)
    )  # [s, t]: sum r >= t
    before = row < column  # The row's token is before the column's.
    d_log_decay = (
        _column_sum(jnp.where(before, spanning + d_log_to_end, 0.0))
        + _column_sum(jnp.where(before, 0.0, d_log_to_token))
        + d_log_whole
    )
    return ChunkGradients(
        query=scale * d_query,
        key=d_key,
        value=d_value,
        log_decay=d_log_decay,
        beta=as_row(d_beta),
        state=d_start,
    )


def as_column(row: jax.Array) -> jax.Array:
    """`[1, n]` as `[n, 1]`, by a masked sum: a transpose of so thin a tile does not lower."""
    r, c = _positions(row.shape[1])
    return _row_sum(jnp.where(r == c, row, 0.0))


def as_row(column: jax.Array) -> jax.Array:
    """`[n, 1]` as `[1, n]`."""
    r, c = _positions(column.shape[0])
    return _column_sum(jnp.where(r == c, column, 0.0))


def _positions(size: int) -> tuple[jax.Array, jax.Array]:
    """Row and column number of every entry of a square tile."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row, column


def _mask(where: jax.Array, like: jax.Array) -> jax.Array:
    """Ones and zeros."""
    return jnp.where(where, jnp.ones((), like.dtype), jnp.zeros((), like.dtype))


def _wide(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays in the dtype to compute in: float32, unless they are float64."""
    return [x.astype(compute_dtype(x.dtype)) for x in arrays]


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)


def _column_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=0, keepdims=True)
