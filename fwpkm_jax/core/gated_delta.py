"""The gated delta rule: a linear memory that decays and then writes each token's error.

Per head, with decay `a_t = exp(log_decay_t)` and write strength `beta_t`, in this order:

    S_t = a_t S_{t-1} + k_t beta_t (v_t - k_t^T a_t S_{t-1})^T        S: [key, value]
    o_t = scale * q_t^T S_t

Two forms with the same results: token by token, and in chunks, where a chunk's writes come from
one triangular solve and only the memory between chunks is sequential.

References: Yang et al. 2024, arXiv:2412.06464 (gated delta rule); Yang et al. 2024,
arXiv:2406.06484 (chunk form).
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.precision import compute_dtype
from fwpkm_jax.core.triangular import unit_lower_inverse

HIGHEST = jax.lax.Precision.HIGHEST


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
      scale: factor on the queries; None for `key ** -0.5`.

    Returns:
      Output `[batch, length, heads, value]` and the memory after the last token.
    """
    inputs = _prepare(query, key, value, log_decay, beta, initial_state, scale)

    def write_then_read(state, token):
        query, key, value, log_decay, beta = token
        state = jnp.exp(log_decay)[..., None, None] * state
        error = value - jnp.einsum("bhk,bhkv->bhv", key, state, precision=HIGHEST)
        state = state + key[..., None] * (beta[..., None] * error)[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", query, state, precision=HIGHEST)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs[:-1])
    state, output = jax.lax.scan(write_then_read, inputs.state, tokens)
    return GatedDeltaOutput(jnp.moveaxis(output, 0, 1), state)


def chunk_gated_delta_rule(
    query: Float[Array, "batch length heads key"],
    key: Float[Array, "batch length heads key"],
    value: Float[Array, "batch length heads value"],
    *,
    log_decay: Float[Array, "batch length heads"],
    beta: Float[Array, "batch length heads"],
    initial_state: Float[Array, "batch heads key value"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
) -> GatedDeltaOutput:
    """The gated delta rule, `chunk_size` tokens at a time: the fast form for whole sequences.

    Inside a chunk the written errors `w` depend on each other through `key_r . key_s`; they solve
    a unit lower triangular system, once for the values and once for what the memory at the
    chunk's start contributes. With `gamma_r` the decay from the chunk's start to token r and
    `Gamma_rs = gamma_r / gamma_s` (rows are tokens, S the memory at the chunk's start):

        (I + tril(diag(beta) (K K^T * Gamma), -1)) [U, Y] = diag(beta) [V, diag(gamma) K]
        W = U - Y S
        O = diag(gamma) Q S + tril(Q K^T * Gamma) W
        S <- gamma_C S + K^T diag(gamma_C / gamma) W

    Arguments and results are those of `recurrent_gated_delta_rule`; any length is accepted.

    Args:
      query: `[batch, length, heads, key]`.
      key: `[batch, length, heads, key]`.
      value: `[batch, length, heads, value]`.
      log_decay: `[batch, length, heads]`.
      beta: `[batch, length, heads]`.
      initial_state: `[batch, heads, key, value]` or None.
      scale: factor on the queries; None for `key ** -0.5`.
      chunk_size: tokens per chunk; changes cost, and results only by rounding.

    Raises:
      ValueError: `chunk_size` is not positive.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} is not positive; use 64, or any number >= 1.")
    inputs = _prepare(query, key, value, log_decay, beta, initial_state, scale)
    length = query.shape[1]
    chunk_size = min(chunk_size, length)

    def to_chunks(x):  # [batch, length, heads, ...] -> [chunks, batch, heads, chunk_size, ...]
        # Added tokens have beta = log_decay = 0, so they leave the memory as it is.
        widths = [(0, 0), (0, -length % chunk_size)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths)
        x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    query, key, value, log_decay, beta = (to_chunks(x) for x in inputs[:-1])
    gamma = jnp.exp(jnp.cumsum(log_decay, axis=-1))
    decay = jnp.exp(_log_decay_between(log_decay))  # Gamma: zero where r < s.
    overlap = jnp.einsum("nbhrk,nbhsk->nbhrs", key, key, precision=HIGHEST)
    solved = jnp.matmul(
        unit_lower_inverse(beta[..., None] * overlap * decay),
        beta[..., None] * jnp.concatenate([value, gamma[..., None] * key], axis=-1),
        precision=HIGHEST,
    )
    own, from_state = jnp.split(solved, [value.shape[-1]], axis=-1)
    attention = jnp.einsum("nbhrk,nbhsk->nbhrs", query, key, precision=HIGHEST) * decay
    to_end = decay[..., -1, :]  # gamma_C / gamma

    def next_chunk(state, chunk):
        own, from_state, attention, query, key, last_gamma = chunk
        written = own - jnp.einsum("bhrk,bhkv->bhrv", from_state, state, precision=HIGHEST)
        output = jnp.einsum("bhrk,bhkv->bhrv", query, state, precision=HIGHEST)
        output += jnp.einsum("bhrs,bhsv->bhrv", attention, written, precision=HIGHEST)
        state = last_gamma[..., None, None] * state
        state += jnp.einsum("bhsk,bhsv->bhkv", key, written, precision=HIGHEST)
        return state, output

    chunks = (
        own,
        from_state,
        attention,
        gamma[..., None] * query,
        to_end[..., None] * key,
        gamma[..., -1],
    )
    state, output = jax.lax.scan(next_chunk, inputs.state, chunks)
    # [chunks, batch, heads, chunk_size, value] -> [batch, length, heads, value]
    output = jnp.moveaxis(output, (0, 2), (1, 3))
    output = output.reshape(output.shape[0], -1, *output.shape[3:])[:, :length]
    return GatedDeltaOutput(output, state)


class _Inputs(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    state: jax.Array


def _prepare(query, key, value, log_decay, beta, initial_state, scale) -> _Inputs:
    """Checked inputs in one dtype, at least float32, with the queries scaled."""
    chex.assert_rank([query, key, value], 4)
    chex.assert_equal_shape([query, key])
    batch, length, heads, key_dim = key.shape
    chex.assert_shape(value, (batch, length, heads, None))
    chex.assert_shape([log_decay, beta], (batch, length, heads))
    chex.assert_axis_dimension_gt(key, 1, 0)
    arrays = [query, key, value, log_decay, beta]
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, value.shape[-1]), jnp.float32)
    chex.assert_shape(initial_state, (batch, heads, key_dim, value.shape[-1]))
    arrays.append(initial_state)
    chex.assert_type(arrays, float)
    dtype = compute_dtype(*(x.dtype for x in arrays))
    query, key, value, log_decay, beta, state = (x.astype(dtype) for x in arrays)
    scale = key_dim**-0.5 if scale is None else scale
    return _Inputs(query * scale, key, value, log_decay, beta, state)


def _log_decay_between(log_decay: Float[Array, "*dims chunk"]) -> Float[Array, "*dims chunk chunk"]:
    """`sum of log_decay over s < t <= r` at `[r, s]`, and -inf where `r < s`.

    Summed from s on rather than as a difference of two running sums: after one strong decay that
    difference would cancel (float32 keeps about 1e-4 of a sum of -1000), and -inf would give NaN.
    """
    chunk = log_decay.shape[-1]
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    later = jnp.expand_dims(jnp.tril(lower, -1), range(log_decay.ndim - 1))
    terms = jnp.where(later, log_decay[..., :, None], 0)
    lower = jnp.expand_dims(lower, range(log_decay.ndim - 1))
    return jnp.where(lower, jnp.cumsum(terms, axis=-2), -jnp.inf)
