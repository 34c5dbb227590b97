"""The gated delta rule: a linear memory that decays and then writes each token's error.

Per head, with decay `a_t = exp(log_decay_t)` and write strength `beta_t`, in this order:

    S_t = a_t S_{t-1} + k_t beta_t (v_t - k_t^T a_t S_{t-1})^T        S: [key, value]
    o_t = scale * q_t^T S_t

Two forms with the same results: token by token, and in chunks
(`core.recurrence.linear_recurrence`).

References: Yang et al. 2024, arXiv:2412.06464 (gated delta rule); Yang et al. 2024,
arXiv:2406.06484 (chunk form).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.recurrence.linear_recurrence import chunk_recurrence, forgetting, scan_tokens


class GatedDeltaOutput(NamedTuple):
    """What was read, and the memory after the last token; both float32 (float64 for float64)."""

    output: Float[Array, "batch length heads value"]
    final_state: Float[Array, "batch heads key value"]


def recurrent_gated_delta_rule(
    query: Float[Array, "batch length heads key"],
    key: Float[Array, "batch length heads key"],
    value: Float[Array, "batch length heads value"],
    *,
    log_decay: Float[Array, "batch length heads"],
    beta: Float[Array, "batch length heads"],
    initial_state: Float[Array, "batch heads key value"] | None = None,
    starts: Bool[Array, "batch length"] | None = None,
    scale: float | None = None,
) -> GatedDeltaOutput:
    """The gated delta rule, token by token: the definition, and the cheap form for one token.

    Args:
      query: what to read with, `[batch, length, heads, key]`.
      key: where to write, `[batch, length, heads, key]`; of at most unit length, or the memory
        may grow without bound.
      value: what to write, `[batch, length, heads, value]`.
      log_decay: log of the share of the memory kept, `<= 0`, `[batch, length, heads]`.
      beta: write strength, `[batch, length, heads]`. `log_decay = beta = 0` skips a token.
      initial_state: memory before the first token, `[batch, heads, key, value]`; None for empty.
      starts: `[batch, length]`, true at tokens before which the memory is set to 0; None: nowhere.
      scale: factor on the queries; None for `key ** -0.5`.
    """
    inputs = _prepare(query, key, value, log_decay, beta, initial_state, starts, scale)

    def write(state, token):
        state = jnp.exp(token.log_decay) * state
        error = token.value - token.key @ state
        return state + jnp.outer(token.key, token.beta * error)

    def read(state, token):
        return token.query @ state

    return GatedDeltaOutput(*scan_tokens(write, read, inputs._replace(state=None), inputs.state))


def chunk_gated_delta_rule(
    query: Float[Array, "batch length heads key"],
    key: Float[Array, "batch length heads key"],
    value: Float[Array, "batch length heads value"],
    *,
    log_decay: Float[Array, "batch length heads"],
    beta: Float[Array, "batch length heads"],
    initial_state: Float[Array, "batch heads key value"] | None = None,
    starts: Bool[Array, "batch length"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
) -> GatedDeltaOutput:
    """The gated delta rule, `chunk_size` tokens at a time: the fast form for whole sequences.

    Arguments and results are those of `recurrent_gated_delta_rule`; any length is accepted.

    Args:
      scale: factor on the queries; None for `key ** -0.5`.
      chunk_size: tokens per chunk; changes cost, and results only by rounding.

    Raises:
      ValueError: `chunk_size` is not positive.
    """
    inputs = _prepare(query, key, value, log_decay, beta, initial_state, starts, scale)
    output = chunk_recurrence(
        *inputs[:3],
        log_decay=inputs.log_decay,
        beta=inputs.beta,
        initial_state=inputs.state,
        chunk_size=chunk_size,
    )
    return GatedDeltaOutput(*output)


class _Inputs(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    state: jax.Array | None


def _prepare(query, key, value, log_decay, beta, initial_state, starts, scale) -> _Inputs:
    """Checked inputs in one dtype, at least float32, with the queries scaled."""
    sizes = check_arrays(
        query=(query, "float batch length heads key"),
        key=(key, "float batch length heads key"),
        value=(value, "float batch length heads value"),
        log_decay=(log_decay, "float batch length heads"),
        beta=(beta, "float batch length heads"),
        initial_state=(initial_state, "float batch heads key value"),
        starts=(starts, "mask batch length"),
    )
    batch, heads, key_dim = (sizes[axis] for axis in ("batch", "heads", "key"))
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, value.shape[-1]), jnp.float32)
    arrays = [query, key, value, log_decay, beta, initial_state]
    dtype = compute_dtype(*(x.dtype for x in arrays))
    query, key, value, log_decay, beta, state = (x.astype(dtype) for x in arrays)
    if starts is not None:
        # A start is a decay of exactly 0, which needs no form of its own.
        log_decay = forgetting(log_decay, starts, dtype=dtype)
    scale = key_dim**-0.5 if scale is None else scale
    return _Inputs(query * scale, key, value, log_decay, beta, state)
