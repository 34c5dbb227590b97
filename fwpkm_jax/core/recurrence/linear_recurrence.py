"""Matrix memories in chunks: one algorithm for every rule that is linear in its memory.

Per sequence and head, with the memory S `[key, value]`, the decay `a_t` (a number, or one per key
channel) and the write strength `beta_t`:

    S <- Diag(a_t) S_{t-1}
    S <- S + k_t v_t^T                                  without beta: additive
    S <- S + k_t beta_t (v_t - S^T k_t)^T               with beta: a delta step
    o_t = S_t^T q_t      or, with read="value",      o_t = S_t q_t

A token with several writes decays once, then writes, then reads once. Instead of a delta step, a
token may read along one direction and subtract the result along another (diagonal plus low rank):

    S <- Diag(a_t) S_{t-1} - b_t (e_t^T S_{t-1}) + k_t v_t^T

References: Yang et al. 2024, arXiv:2312.06635 (chunks with decay per channel), arXiv:2406.06484
(delta steps), arXiv:2412.06464 (both); Siems et al. 2025, arXiv:2502.10297 (several per token).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.recurrence.chunk_decay import (
    HIGHEST,
    LOWEST_LOG_DECAY,
    ChunkDecay,
    chunk_decay,
)
from fwpkm_jax.core.recurrence.triangular import unit_lower_inverse

ReadAxis = Literal["key", "value"]


class Erasure(NamedTuple):
    """What a token subtracts from the memory in addition to its decay: `at (found^T S)`.

    Attributes:
      found: e, the direction that is read before the token's decay.
      at: b, the direction along which the result is subtracted.
    """

    found: Float[Array, "batch length heads key"]
    at: Float[Array, "batch length heads key"]


class Together(NamedTuple):
    """Strengths of delta steps whose errors are all taken at the memory before their token."""

    beta: Float[Array, "batch writes heads"]


class RecurrenceTokens(NamedTuple):
    """What the recurrence takes of all tokens, `[batch, length, heads, ...]`, or of one chunk,
    `[batch, heads, tokens, ...]`; None for what a rule does not have.

    Attributes:
      query: one for each token; the others have one entry for each write.
      key: where to write.
      value: what to write.
      log_decay: of a head, or of each key channel; 0 for all but a token's first write.
      beta: strength of delta steps.
      erasure: what is subtracted.
    """

    query: Array
    key: Array
    value: Array
    log_decay: Array | None
    beta: Array | None
    erasure: Erasure | None


class RecurrenceOutput(NamedTuple):
    """What was read, and the memory after the last token; both at least float32."""

    output: Float[Array, "batch length heads read"]
    final_state: Any


def scan_tokens(
    write: Callable[[Any, Any], Any],
    read: Callable[[Any, Any], Array],
    tokens: Any,
    state: Any,
) -> RecurrenceOutput:
    """A memory written and then read token by token: the definition, and the form for one token.

    Products in `write` and `read` have full precision on every device.

    Args:
      write: one head's memory after one token.
      read: what one token reads from one head's memory.
      tokens: leaves `[batch, length, heads, ...]`.
      state: memory before the first token, leaves `[batch, heads, ...]`.
    """

    def step(state, token):
        state = write(state, token)
        return state, read(state, token)

    # Sequences and heads do not meet: a rule is written for one head.
    every_head = jax.vmap(jax.vmap(step))
    in_turn = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    with jax.default_matmul_precision(HIGHEST):
        state, output = jax.lax.scan(every_head, state, in_turn)
    return RecurrenceOutput(jnp.moveaxis(output, 0, 1), state)


def chunk_recurrence(
    query: Float[Array, "batch length heads asked"],
    key: Float[Array, "batch writes heads key"],
    value: Float[Array, "batch writes heads value"],
    *,
    log_decay: Float[Array, "batch length heads"] | Float[Array, "batch length heads key"] | None,
    beta: Float[Array, "batch writes heads"] | Together | None,
    initial_state: Float[Array, "batch heads key value"] | None = None,
    starts: Bool[Array, "batch length"] | None = None,
    read: ReadAxis = "key",
    erasure: Erasure | None = None,
    chunk_size: int = 64,
) -> RecurrenceOutput:
    """The recurrence above, `chunk_size` writes at a time: the fast form for whole sequences.

    With rows for tokens, S the memory at the chunk's start, `g` the decay from there to each
    token, `e` from each token to the chunk's end and `P(X, Y)_rs = sum_k X_rk Y_sk decay_rsk`:

        W = V                                                  without beta, else from
        (I + tril(diag(beta) P(K, K), -1)) W = diag(beta) (V - (g K) S)
        O = (g Q) S + P(Q, K) W
        S <- g_C S + (e K)^T W

    With an erasure, where `g'` and `P'` leave out the reading token's own decay:

        (I + tril(P'(E, B), -1)) U = -((g' E) S + P'(E, K) V)
        O = (g Q) S + P(Q, B) U + P(Q, K) V
        S <- g_C S + (e B)^T U + (e K)^T V

    Time and memory are linear in the length; a backward pass keeps the memory at every chunk's
    start and computes the rest of a chunk again.

    Args:
      query: what to read with, as wide as the keys, or as the values with `read="value"`.
      key: where to write; a multiple of the length for several writes per token, in order.
      value: what to write.
      log_decay: log of the share kept, `<= 0` (-inf for nothing); None: everything is kept.
      beta: strength of delta steps, each of which takes its error after the one before, or
        `Together`; None: writes add.
      initial_state: memory before the first token; None: empty.
      starts: true at tokens before which the memory is set to 0; None: nowhere.
      read: the axis of the memory that is summed over with the query; the output has the other.
      erasure: what each token subtracts; needs one write per token, `read="key"` and no `beta`.
      chunk_size: writes per chunk; changes cost, and results only by rounding.

    Raises:
      ValueError: `chunk_size` is not positive, the writes are no multiple of the length,
        channels decay on their own with `read="value"` and several writes per token, or an erasure
        comes with what it excludes.
    """
    batch, length, heads, _ = query.shape
    steps = _writes_per_token(length, key.shape[1])
    together = isinstance(beta, Together)
    beta = beta.beta if isinstance(beta, Together) else beta
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} is not positive; use 64, or any number >= 1.")
    fade_apart = log_decay is not None and log_decay.ndim == 4
    if read == "value" and fade_apart and steps > 1:
        raise ValueError(
            f"A decay per key channel, read along the value axis, takes one write per token, got "
            f"{steps}; give one decay per head, log_decay [batch, length, heads]."
        )
    if erasure is not None and (beta is not None or steps > 1 or read == "value"):
        raise ValueError(
            f"An erasure takes no beta, one write per token and read='key'; got {steps} writes per "
            f"token, read={read!r} and {'no ' if beta is None else ''}beta."
        )
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key.shape[3], value.shape[3]), jnp.float32)
    if starts is not None:
        log_decay = forgetting(log_decay, starts, dtype=key.dtype)
    if erasure is not None and starts is not None:
        # No token reads what was written before a start.
        found = jnp.where(starts[:, :, None, None], 0, erasure.found)
        erasure = erasure._replace(found=found)
    tokens = RecurrenceTokens(query, key, value, log_decay, beta, erasure)
    dtype = compute_dtype(initial_state.dtype, *(x.dtype for x in jax.tree.leaves(tokens)))
    tokens = jax.tree.map(lambda x: x.astype(dtype), tokens)
    if tokens.log_decay is not None:
        tokens = tokens._replace(log_decay=_with_first_writes(tokens.log_decay, steps))
    tokens_per_chunk = min(max(chunk_size // steps, 1), length)

    def next_chunk(state, chunk):
        return _read_and_write(state, chunk, read, steps, together)

    # Queries apart: a token reads once, however often it writes.
    writes = tokens._replace(query=None)
    writes = jax.tree.map(lambda x: _to_chunks(x, steps * tokens_per_chunk), writes)
    chunks = writes._replace(query=_to_chunks(tokens.query, tokens_per_chunk))
    # Nothing between the chunks' states is kept for a backward pass.
    next_chunk = jax.checkpoint(next_chunk, prevent_cse=False)
    state, output = jax.lax.scan(next_chunk, initial_state.astype(dtype), chunks)
    # [chunks, batch, heads, tokens, read] -> [batch, length, heads, read]
    output = jnp.moveaxis(output, (0, 2), (1, 3))
    output = output.reshape(batch, -1, *output.shape[3:])[:, :length]
    return RecurrenceOutput(output, state)


def forgetting(log_decay: Array | None, starts: Bool[Array, "batch length"], *, dtype) -> Array:
    """The log decays `[batch, length, heads or 1, ...]` with nothing kept where `starts` is true.

    The share kept is exactly 0, so that nothing, gradients included, passes a start.
    """
    if log_decay is None:
        log_decay = jnp.zeros((*starts.shape, 1), dtype)
    at = jnp.expand_dims(starts, range(2, log_decay.ndim))
    return jnp.where(at, jnp.asarray(LOWEST_LOG_DECAY, log_decay.dtype), log_decay)


def _read_and_write(
    state: Float[Array, "batch heads key value"],
    chunk: RecurrenceTokens,
    read: ReadAxis,
    steps: int,
    together: bool,
) -> tuple[Float[Array, "batch heads key value"], Float[Array, "batch heads tokens read"]]:
    """One chunk, leaves `[batch, heads, ...]`: the memory after it, and what was read."""
    query, key, value = chunk.query, chunk.key, chunk.value
    decay, products = _products(chunk.log_decay, key)
    last = slice(steps - 1, None, steps)  # Each token's last write; it reads after it.
    key_from_start, key_to_end = key, key
    if decay is not None:
        key_from_start, key_to_end = decay.from_start * key, decay.to_end * key
    written = value
    if chunk.beta is not None:
        beta = chunk.beta[..., None]
        error = value - jnp.einsum("bhsk,bhkv->bhsv", key_from_start, state, precision=HIGHEST)
        # Each error needs those of the writes before it in the chunk: a triangular system.
        met = beta * products(key, slice(None))
        if together:
            token = np.arange(key.shape[2]) // steps
            met = jnp.where(token[:, None] == token[None], 0, met)
        solve = unit_lower_inverse(met)
        written = jnp.einsum("bhrs,bhsv->bhrv", solve, beta * error, precision=HIGHEST)
    erased, at = None, None
    if chunk.erasure is not None:
        erased, at = _erased(state, chunk.erasure, value, decay, products), chunk.erasure.at
    if read == "key":
        from_start = query if decay is None else decay.from_start[:, :, last] * query
        output = jnp.einsum("bhrk,bhkv->bhrv", from_start, state, precision=HIGHEST)
        output += jnp.einsum("bhrs,bhsv->bhrv", products(query, last), written, precision=HIGHEST)
        if erased is not None:
            # What was erased since the chunk began is missing from the reads after it.
            met = products(query, last, at)
            output += jnp.einsum("bhrs,bhsv->bhrv", met, erased, precision=HIGHEST)
    else:
        output = jnp.einsum("bhrv,bhkv->bhrk", query, state, precision=HIGHEST)
        met = jnp.einsum("bhrv,bhsv->bhrs", query, written, precision=HIGHEST)
        if decay is not None:
            output *= decay.from_start[:, :, last]
        if decay is not None and decay.from_start.shape[-1] > 1:
            # What is read along the value axis still has key channels, and they fade apart.
            output += decay.sums(met, key)
        else:
            met *= _between(decay, met)[:, :, last]
            output += jnp.einsum("bhrs,bhsk->bhrk", met, key, precision=HIGHEST)
    if decay is not None:
        state = decay.from_start[:, :, -1, :, None] * state
    state += jnp.einsum("bhsk,bhsv->bhkv", key_to_end, written, precision=HIGHEST)
    if erased is not None and at is not None:
        at = at if decay is None else decay.to_end * at
        state += jnp.einsum("bhsk,bhsv->bhkv", at, erased, precision=HIGHEST)
    return state, output


def _erased(
    state: Float[Array, "batch heads key value"],
    erasure: Erasure,
    value: Float[Array, "batch heads chunk value"],
    decay: ChunkDecay | None,
    products: Callable[..., Array],
) -> Float[Array, "batch heads chunk value"]:
    """`-e_t^T S_{t-1}` of each token."""
    found = erasure.found
    # A token reads before its own decay, so that its decays are those of the row before.
    earlier = jnp.concatenate([found[:, :, 1:], jnp.zeros_like(found[:, :, :1])], axis=2)

    def of_own_rows(x: Array) -> Array:
        return jnp.pad(x[:, :, :-1], [(0, 0), (0, 0), (1, 0), (0, 0)])

    from_start = found
    if decay is not None:
        before = decay.from_start[:, :, :-1]
        from_start = jnp.concatenate([jnp.ones_like(before[:, :, :1]), before], axis=2) * found
    answer = jnp.einsum("bhsk,bhkv->bhsv", from_start, state, precision=HIGHEST)
    met = of_own_rows(products(earlier, slice(None)))
    answer += jnp.einsum("bhrs,bhsv->bhrv", met, value, precision=HIGHEST)
    solve = unit_lower_inverse(of_own_rows(products(earlier, slice(None), erasure.at)))
    return -jnp.einsum("bhrs,bhsv->bhrv", solve, answer, precision=HIGHEST)


def _products(
    log_decay: Array | None, key: Float[Array, "batch heads chunk key"]
) -> tuple[ChunkDecay | None, Callable[..., Array]]:
    """The chunk's decays, and P(X, K) of rows X that stand at a slice of the chunk's writes.

    P takes other columns than K as its last argument.
    """
    if log_decay is not None and log_decay.ndim == 4:
        decay = chunk_decay(log_decay)

        def faded_apart(rows, places, columns=key):
            rows = jnp.zeros_like(key).at[:, :, places].set(rows)
            return decay.products(rows, columns)[:, :, places]

        return decay, faded_apart

    decay = None if log_decay is None else chunk_decay(log_decay[..., None])
    between = _between(decay, key.swapaxes(-1, -2))

    def faded_together(rows, places, columns=key):
        overlap = jnp.einsum("bhrk,bhsk->bhrs", rows, columns, precision=HIGHEST)
        return overlap * between[:, :, places]

    return decay, faded_together


def _between(
    decay: ChunkDecay | None, like: Float[Array, "batch heads rows chunk"]
) -> Float[Array, "#batch #heads chunk chunk"]:
    """The decay from write s to write r at `[r, s]`: 0 where `r < s`, and 1 without any decay."""
    if decay is not None:
        return decay.between()
    return jnp.tril(jnp.ones((1, 1, like.shape[-1], like.shape[-1]), like.dtype))


def _writes_per_token(length: int, writes: int) -> int:
    if length < 1 or writes % length:
        raise ValueError(
            f"{writes} keys for {length} queries: the writes must be a multiple of the tokens, of "
            "which there is at least one."
        )
    return writes // length


def _with_first_writes(x: Array, steps: int) -> Array:
    """`[batch, length, ...]` to `[batch, length * steps, ...]`: each before zeros."""
    widths = [(0, 0), (0, 0), (0, steps - 1)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x[:, :, None], widths).reshape(x.shape[0], -1, *x.shape[2:])


def _to_chunks(x: Array, chunk_size: int) -> Array:
    """`[batch, writes, heads, ...]` to `[chunks, batch, heads, chunk_size, ...]`.

    Tokens added at the end are zero in everything, which leaves any memory as it is.
    """
    widths = [(0, 0), (0, -x.shape[1] % chunk_size)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, widths)
    x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))
