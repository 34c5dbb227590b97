"""The loops over the chunks of the keys on a Hopper GPU.

Every kernel reads its chunk where it lies in the arrays of all chunks and writes in place, because
each slice would be a launch. XLA computes vectors, a few numbers per token or sub-key.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from fwpkm_jax.core.array_types import SubKeys
from fwpkm_jax.core.slots.keys.addressing import SubKeyChoice
from fwpkm_jax.core.slots.keys.scan import (
    Find,
    KeyScanOutput,
    KeyStep,
    ScannedChunk,
    StepSums,
    coefficients_of_scores,
)
from fwpkm_jax.core.slots.values.exchange import of_chunk
from fwpkm_jax.core.slots.write import (
    KeyWrite,
    SubKeyUsage,
    addressing_coefficients,
    of_chosen,
    usage_slopes,
)
from pallas_kernels.key_scan import gpu_rows
from pallas_kernels.key_scan.gpu_add import add, query_terms, totals
from pallas_kernels.key_scan.gpu_rows import pulls_back, step, step_back
from pallas_kernels.mosaic_gpu import sequential_vmap
from pallas_kernels.product_top_k.gpu_select import select_chunk, terms_of


def forward(
    top_k: int,
    find: Find,
    key_write: KeyWrite,
    keys: SubKeys,
    queries: jax.Array,
    token_weights: jax.Array,
) -> tuple[KeyScanOutput, jax.Array, StepSums]:
    """The scan, the keys before each chunk, the steps' sums; as in `core.slots.keys.scan`."""
    run = sequential_vmap(functools.partial(_forward, top_k, key_write))
    return run(keys, queries, token_weights)


# `jit` traces this once for equal arguments, so a model with several memories lowers it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(top_k, key_write, keys, queries, token_weights):
    heads, _, subkeys, half = keys.shape
    chunks, tokens = token_weights.shape
    codebooks = 2 * heads
    rows = queries.reshape(chunks, tokens, codebooks * half)
    # The queries do not change, so they are split into bfloat16 terms once.
    row_terms = query_terms(rows)
    first = keys.reshape(codebooks, subkeys, half)
    # Otherwise XLA fills constant weights in anew for every chunk.
    token_weights = jax.lax.optimization_barrier(token_weights)
    weights = heads * jnp.sum(token_weights, axis=1)

    @jax.jit
    def body(carry, _):
        # The number of the chunk is carried: a slice of all numbers would be a launch.
        chunk, history, sums_of, terms, norms, ids, scores = carry
        # Each kernel writes its chunk of these arrays where it lies; `freeze` gives them back, so
        # that the scan carries them in place.
        refs = [_ref(x) for x in (history, sums_of, ids, scores)]
        number = chunk[None]
        select_chunk(rows, number, terms, norms, *refs[2:], score=key_write.score)
        ids, scores = (jax.freeze(x) for x in refs[2:])
        # Access of sub-keys, before the step that depends on it.
        access, shares = totals(number, ids, scores, token_weights, subkeys=subkeys)
        assert shares is not None
        # XLA computes the slopes: a few numbers for each sub-key.
        usage = SubKeyUsage(_summed(access), of_chunk(chunk, weights))
        choice, each = of_chunk(chunk, (_choice(ids, scores, heads), token_weights))
        slopes = of_chosen(usage_slopes(usage), choice.sub_key_ids)
        pulls = addressing_coefficients(
            choice.sub_key_scores,
            slopes,
            each,
            usage,
            score=key_write.score,
            probabilities=_by_token(shares, heads),
        )
        sums, of_sub_keys = add(row_terms, number, ids, _by_codebook(pulls)[None], subkeys=subkeys)
        # Moves the sub-keys and writes the terms that the next chunk selects by.
        terms, norms = step(refs[0], refs[1], number, sums, of_sub_keys, **_factors(key_write))
        history, sums_of = (jax.freeze(x) for x in refs[:2])
        return (chunk + 1, history, sums_of, terms, norms, ids, scores), usage.access

    # Every chunk's keys stay: the backward pass reads them.
    history = jnp.zeros((chunks + 1, *first.shape), first.dtype).at[0].set(first)
    chosen = (chunks, codebooks, top_k, tokens)
    start = (
        jnp.zeros((), jnp.int32),
        history,
        jnp.zeros((chunks, codebooks, subkeys), jnp.float32),
        tuple(terms_of(first)),
        jnp.sum(first**2, axis=-1),
        jnp.zeros(chosen, jnp.int32),
        jnp.zeros(chosen, jnp.float32),
    )
    (_, history, sums_of, _, _, ids, scores), access = jax.lax.scan(body, start, length=chunks)
    history = history.reshape(chunks + 1, *keys.shape)
    out = KeyScanOutput(history[-1], _choice(ids, scores, heads))
    return out, history[:-1], StepSums(access, sums_of.reshape(chunks, heads, 2, subkeys))


def backward(
    key_write: KeyWrite, keys_bar: SubKeys, chunks: ScannedChunk, steps: KeyStep
) -> tuple[SubKeys, tuple[jax.Array, jax.Array]]:
    """Cotangents of keys and gradients, and all pulls; as the loop in `core.slots.keys.scan`."""
    return sequential_vmap(functools.partial(_backward, key_write))(keys_bar, chunks, steps)


def _backward(key_write, keys_bar, chunks, steps):
    number, heads, _, subkeys, half = chunks.keys.shape
    tokens = chunks.query.shape[1]
    codebooks = 2 * heads
    factors = _factors(key_write)
    halves = chunks.query.reshape(number, tokens, codebooks, half)
    row_terms = query_terms(chunks.query.reshape(number, tokens, codebooks * half))
    history = chunks.keys.reshape(number, codebooks, subkeys, half)
    ids = _by_codebook(chunks.choice.sub_key_ids)
    step_totals = steps.totals.reshape(number, codebooks, subkeys)

    def body(carry, _):
        chunk, bars, dots, pulls = carry
        at = chunk[None]
        # From the cotangents after the step to those of this chunk's pulls.
        pulls_bar = pulls_back(halves, at, bars, dots, ids, move=factors["move"])
        pulls_bar = _by_token(pulls_bar, heads)
        one, how = of_chunk(chunk, (chunks, steps))

        def totals_of(slopes_bar: jax.Array) -> jax.Array:
            return _summed(totals(at, ids, _by_codebook(slopes_bar)[None], subkeys=subkeys)[0])

        new = coefficients_of_scores(
            one, how, pulls_bar, score=key_write.score, totals_of=totals_of
        )
        new = _by_codebook(new)
        # Kept for the queries, whose cotangents are computed for all chunks at once.
        pulls = jax.lax.dynamic_update_index_in_dim(pulls, new, chunk, 0)
        sums, of_sub_keys = add(row_terms, at, ids, pulls, subkeys=subkeys)
        # Writes the cotangents of the keys before the step behind those after it.
        moved = _stepped_back(bars, at, history, step_totals, sums, of_sub_keys, **factors)
        return (chunk - 1, *moved, pulls), None

    last = keys_bar.reshape(codebooks, subkeys, half)
    start = (
        jnp.full((), number - 1, jnp.int32),
        jnp.zeros((number + 1, *last.shape), last.dtype).at[number].set(last),
        jnp.sum(history[-1] * last, axis=-1),
        jnp.zeros(ids.shape, jnp.float32),
    )
    (_, bars, _, pulls), _ = jax.lax.scan(body, start, length=number)
    bars = bars.reshape(number + 1, *keys_bar.shape)
    return bars[0], (factors["move"] * bars[1:], _by_token(pulls, heads))


def to_queries(
    key_write: KeyWrite,
    chunks: ScannedChunk,
    step_pulls: jax.Array,
    gradient_bar: jax.Array,
    pulls: jax.Array,
) -> jax.Array:
    """The cotangents of all queries; as in `core.slots.keys.scan`."""
    return sequential_vmap(_to_queries)(chunks, step_pulls, gradient_bar, pulls)


def _to_queries(chunks, step_pulls, gradient_bar, pulls):
    number, heads, _, subkeys, half = chunks.keys.shape
    tokens = chunks.query.shape[1]
    codebooks = 2 * heads
    of_tokens = [chunks.choice.sub_key_ids, step_pulls, pulls]
    out = gpu_rows.to_queries(
        chunks.query.reshape(number, tokens, codebooks, half),
        *(x.reshape(number, codebooks, subkeys, half) for x in (chunks.keys, gradient_bar)),
        *(x.reshape(number, tokens, codebooks, -1) for x in of_tokens),
    )
    return out.reshape(chunks.query.shape)


# Compiled, because a ref in GPU memory exists only inside a compiled function.
@functools.partial(jax.jit, static_argnames=("keep", "move"))
def _stepped_back(bars, at, history, step_totals, sums, totals, *, keep, move):
    ref = _ref(bars)
    dots = step_back(ref, at, history, step_totals, sums, totals, keep=keep, move=move)
    return jax.freeze(ref), dots


def _summed(totals: jax.Array) -> jax.Array:
    """Totals `[parts, codebooks, subkeys]` over parts and heads, `[2, subkeys]`."""
    return totals.reshape(-1, 2, totals.shape[-1]).sum(0)


def _factors(key_write: KeyWrite) -> dict[str, float]:
    """`KeyWrite.step` as the kernels compute it: `new = keep * keys + move * gradient`, for the
    gradient of the loss without its weight."""
    rate = key_write.learning_rate
    return {"keep": 1.0 - rate * key_write.weight_decay, "move": -rate * key_write.loss_weight}


def _ref(x: jax.Array) -> Any:
    return jax.new_ref(x, memory_space=plgpu.GMEM)


def _choice(ids: jax.Array, scores: jax.Array, heads: int) -> SubKeyChoice:
    return SubKeyChoice(_by_token(ids, heads), _by_token(scores, heads))


def _by_token(x: jax.Array, heads: int) -> jax.Array:
    """`[..., codebooks, top_k, tokens]` as `[..., tokens, heads, 2, top_k]`."""
    x = x.reshape(*x.shape[:-3], heads, 2, *x.shape[-2:])
    return jnp.moveaxis(x, -1, -4)


def _by_codebook(x: jax.Array) -> jax.Array:
    """The way back of `_by_token`."""
    x = jnp.moveaxis(x, -4, -1)
    return x.reshape(*x.shape[:-4], -1, *x.shape[-2:])
