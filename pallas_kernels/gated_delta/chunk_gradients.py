"""The backward pass of one chunk of the gated delta rule, derived in docs/explanation/math.md."""

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.arguments import Inputs
from pallas_kernels.gated_delta.chunk import chunk_decays, chunk_written
from pallas_kernels.gated_delta.tiles import ALONE, SideBySide, column_sum, each, mask, wide


def chunk_backward(
    inputs: Inputs,
    inverse: jax.Array,
    d_output: jax.Array,
    d_state: jax.Array,
    side: SideBySide = ALONE,
    *,
    scale: float,
) -> Inputs:
    """Cotangents of one chunk's inputs, from those of its output and of the memory after it.

    Args: the inputs of `chunk_forward`; its result `inverse [chunk, chunk]`, and the cotangents
      `d_output [chunk, value]` and `d_state [key, value]`, both float32.
    """
    query, key, value, log_decay, beta, state = inputs
    product, times = side.product, side.scale
    decays, betas = chunk_decays(log_decay, side), side.columns(beta)
    overlap = product(key, key, contract=(1, 1))
    scores = scale * product(query, key, contract=(1, 1))
    query, key, value = wide(query, key, value)
    query = scale * query
    own_error, recalled, errors = chunk_written(key, value, betas, decays, inverse, state, side)
    size = overlap.shape[0]
    row, column = side.positions(size)
    strict = row > column

    # The memory after: whole * S + (to_end * K)^T W.
    from_end = product(errors, d_state, contract=(1, 1))  # [chunk, key]
    d_errors = product(times(decays.to_end, key), d_state)
    d_key = times(decays.to_end, from_end)
    d_log_to_end = each(jnp.multiply, decays.to_end, side.sums(key * from_end))
    d_log_whole = each(jnp.multiply, decays.whole, each(column_sum, side.sums(d_state * state)))
    d_start = times(decays.whole, d_state)

    # The output: to_token * Q S + (scores * between) W.
    from_output = product(d_output, state, contract=(1, 1))  # [chunk, key]
    d_query = times(decays.to_token, from_output)
    d_log_to_token = each(jnp.multiply, decays.to_token, side.sums(query * from_output))
    d_start += product(times(decays.to_token, query), d_output, contract=(0, 0))
    d_errors += product(scores * decays.between, d_output, contract=(0, 0))
    d_scores = product(d_output, errors, contract=(1, 1)) * decays.between
    d_log_between = d_scores * scores
    d_query += product(d_scores, key)
    d_key += product(d_scores, query, contract=(0, 0))

    # The errors: inverse times beta * R, R = V - to_token * K S.
    d_weighted = product(inverse, d_errors, contract=(0, 0))
    d_value = times(betas, d_weighted)
    d_betas = side.sums(d_weighted * own_error)
    d_recalled = -times(decays.to_token, d_value)
    d_log_to_token = each(jnp.add, d_log_to_token, side.sums(d_recalled * recalled))
    d_key += product(d_recalled, state, contract=(1, 1))
    d_start += product(key, d_recalled, contract=(0, 0))

    # The triangular matrix that is inverted: beta * overlap * between, below the diagonal.
    d_lower = jnp.where(strict, -product(d_weighted, errors, contract=(1, 1)), 0.0)
    d_lower *= decays.between
    d_betas = each(jnp.add, d_betas, side.sums(d_lower * overlap))
    d_overlap = times(betas, d_lower)
    d_log_between += d_overlap * overlap
    d_key += product(d_overlap, key) + product(d_overlap, key, contract=(0, 0))

    # Each log decay is part of every product that spans its token. As in `chunk_decays`, sum
    # exactly these terms instead of subtracting running sums.
    within = mask(row >= column, d_log_between)
    within = within.astype(jnp.bfloat16 if side.rounded else within.dtype)
    spanning = side.careful_product(d_log_between, within, contract=(0, 0))  # [s, t]: sum r >= t
    before = row < column  # The row's token is before the column's.
    d_log_decay = (
        column_sum(jnp.where(before, spanning + side.choose(d_log_to_end, size), 0.0))
        + column_sum(jnp.where(before, 0.0, side.choose(d_log_to_token, size)))
        + side.choose(d_log_whole, size)
    )
    return Inputs(
        query=scale * d_query,
        key=d_key,
        value=d_value,
        log_decay=d_log_decay,
        beta=side.row(d_betas),
        state=d_start,
    )
