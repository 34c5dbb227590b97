"""Mosaic GPU kernels that move rows of sub-keys, one warpgroup per token or sub-key."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import IN_FLIGHT, launch, row


def step(
    history: Any,
    step_totals: Any,
    chunk: jax.Array,
    sums: jax.Array,
    totals: jax.Array,
    *,
    keep: float,
    move: float,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The sub-keys after a chunk's step, and what the next chunk's selection needs of them.

    Args:
      history: the ref of the sub-keys before each chunk and after the last,
        `[chunks + 1, codebooks, subkeys, half]`; the next ones are written.
      step_totals: the ref of the pulls' sums of all chunks, `[chunks, codebooks, subkeys]`; this
        chunk's are written.
      chunk: which of the chunks, `[1]`.
      sums: of pulled queries by sub-key, `[splits, codebooks, subkeys, half]`.
      totals: of pulls, `[splits, codebooks, subkeys]`.
      keep: share of the sub-keys that weight decay leaves.
      move: multiplies the gradient.

    Returns:
      Three bfloat16 terms `[codebooks, subkeys, half]` whose sum are the sub-keys, and their
      squared norms `[codebooks, subkeys]`.
    """
    splits, codebooks, subkeys, half = sums.shape

    def body(program, chunk, sums, totals, history, step_totals, *outs):
        *terms, norms = outs
        chunk, place = chunk[0], (program // subkeys, program % subkeys)
        old = row(history, (chunk, *place))
        gradient, total = _summed(sums, totals, place, splits, old)
        step_totals[chunk, *place] = total
        new = keep * old + move * gradient
        history[chunk + 1, *place] = new
        norms[place] = jnp.sum(new * new)
        # Each bfloat16 term takes the leading bits of what the terms before left.
        for ref in terms:
            term = new.astype(jnp.bfloat16)
            ref[place] = term
            new = new - term.astype(jnp.float32)

    term = jax.ShapeDtypeStruct((codebooks, subkeys, half), jnp.bfloat16)
    *terms, norms = launch(
        body,
        chunk,
        sums,
        totals,
        history,
        step_totals,
        programs=codebooks * subkeys,
        out_type=[term] * 3 + [jax.ShapeDtypeStruct((codebooks, subkeys), jnp.float32)],
        name="key_scan_step",
    )
    return tuple(terms), norms


def pulls_back(
    queries: jax.Array,
    chunk: jax.Array,
    bars: jax.Array,
    dots: jax.Array,
    ids: jax.Array,
    *,
    move: float,
) -> jax.Array:
    """The cotangents of a chunk's pulls, `[codebooks, top_k, tokens]`.

    Each is `move * sum((query - sub-key) * bar)`. The part of the sub-key is the same for all
    tokens, so that a token reads the rows of cotangents alone.

    Args:
      queries: `[chunks, tokens, codebooks, half]`, float32 or bfloat16.
      chunk: which of the chunks, `[1]`.
      bars: cotangents of the sub-keys before each chunk and after the last.
      dots: of each sub-key before the chunk and its cotangent after it, `[codebooks, subkeys]`.
      ids: the chosen sub-keys, `[chunks, codebooks, top_k, tokens]`.
      move: multiplies the gradient in the step.
    """
    _, codebooks, top_k, tokens = ids.shape

    def body(token, queries, chunk, bars, dots, ids, out):
        chunk = chunk[0]
        for codebook in range(codebooks):
            query = row(queries, (chunk, token, codebook)).astype(jnp.float32)
            chosen = [ids[chunk, codebook, place, token] for place in range(top_k)]
            # The ids are loaded first; then all rows that they name load together.
            of_keys = [dots[codebook, one] for one in chosen]
            rows = [row(bars, (chunk + 1, codebook, one)) for one in chosen]
            for place, (of_key, bar) in enumerate(zip(of_keys, rows, strict=True)):
                out[codebook, place, token] = move * (jnp.sum(query * bar) - of_key)

    (out,) = launch(
        body,
        queries,
        chunk,
        bars,
        dots,
        ids,
        programs=tokens,
        out_type=[jax.ShapeDtypeStruct((codebooks, top_k, tokens), jnp.float32)],
        name="key_scan_pulls_back",
    )
    return out


def to_queries(
    queries: jax.Array,
    history: jax.Array,
    gradient_bar: jax.Array,
    ids: jax.Array,
    step_pulls: jax.Array,
    pulls: jax.Array,
) -> jax.Array:
    """The cotangents of all queries, in their dtype, `[chunks, tokens, codebooks, half]`.

    Each is the sum over the token's places of

        step_pulls * gradient_bar[id] + pulls * (query - keys[id])

    so a token reads the rows that it chose, and those alone.

    Args:
      queries: `[chunks, tokens, codebooks, half]`, float32 or bfloat16.
      history: the sub-keys before each chunk, `[chunks, codebooks, subkeys, half]`.
      gradient_bar: the cotangents of each chunk's gradient, like `history`.
      ids: the chosen sub-keys, `[chunks, tokens, codebooks, top_k]`.
      step_pulls: pulls of each chunk's step, like `ids`.
      pulls: what the scores' cotangents cause, like `ids`.
    """
    chunks, tokens, codebooks, top_k = ids.shape

    def body(program, queries, history, gradient_bar, ids, step_pulls, pulls, out):
        chunk, token = program // tokens, program % tokens
        for codebook in range(codebooks):
            place = chunk, token, codebook
            chosen = [ids[*place, one] for one in range(top_k)]
            of_steps = [step_pulls[*place, one] for one in range(top_k)]
            of_scores = [pulls[*place, one] for one in range(top_k)]
            query = row(queries, place).astype(jnp.float32)
            # The queries' part of all places is one product.
            total = functools.reduce(operator.add, of_scores) * query
            for first in range(0, top_k, IN_FLIGHT):
                some = slice(first, first + IN_FLIGHT)
                keys = [row(history, (chunk, codebook, one)) for one in chosen[some]]
                bars = [row(gradient_bar, (chunk, codebook, one)) for one in chosen[some]]
                for step_pull, bar in zip(of_steps[some], bars, strict=True):
                    total += step_pull * bar
                for pull, key in zip(of_scores[some], keys, strict=True):
                    total -= pull * key
            out[place] = total.astype(queries.dtype)

    (out,) = launch(
        body,
        queries,
        history,
        gradient_bar,
        ids,
        step_pulls,
        pulls,
        programs=chunks * tokens,
        out_type=[jax.ShapeDtypeStruct(queries.shape, queries.dtype)],
        name="key_scan_to_queries",
    )
    return out


def step_back(
    bars: Any,
    chunk: jax.Array,
    history: jax.Array,
    step_totals: jax.Array,
    sums: jax.Array,
    totals: jax.Array,
    *,
    keep: float,
    move: float,
) -> jax.Array:
    """Writes the cotangents of the sub-keys before a chunk.

    Args:
      bars: the ref of the cotangents of the sub-keys before each chunk and after the last,
        `[chunks + 1, codebooks, subkeys, half]`.
      chunk: which of the chunks, `[1]`.
      history: the sub-keys before each chunk, `[chunks, codebooks, subkeys, half]`.
      step_totals: sums of the pulls of the chunks' steps, `[chunks, codebooks, subkeys]`.
      sums: as for `step`, of the pulls that the scores' cotangents cause.
      totals: as for `step`, of the same pulls.
      keep: as for `step`.
      move: as for `step`.

    Returns:
      What `pulls_back` of the chunk before needs, `dots`; for the first chunk no one's.
    """
    splits, codebooks, subkeys, _ = sums.shape

    def body(program, chunk, history, step_totals, sums, totals, bars, dots):
        chunk, place = chunk[0], (program // subkeys, program % subkeys)
        after = row(bars, (chunk + 1, *place))
        # The inner products for the chunk before, while its cotangent is in registers.
        before = row(history, (jnp.maximum(chunk - 1, 0), *place))
        gradient, _ = _summed(sums, totals, place, splits, row(history, (chunk, *place)))
        kept = keep - move * step_totals[chunk, *place]
        bar = kept * after - gradient
        bars[chunk, *place] = bar
        dots[place] = jnp.sum(before * bar)

    (dots,) = launch(
        body,
        chunk,
        history,
        step_totals,
        sums,
        totals,
        bars,
        programs=codebooks * subkeys,
        out_type=[jax.ShapeDtypeStruct((codebooks, subkeys), jnp.float32)],
        name="key_scan_step_back",
    )
    return dots


def _summed(sums, totals, place, splits, keys):
    """The sum over tokens of `pull * (query - sub-key)` for one sub-key, and that of the pulls."""
    parts = [row(sums, (split, *place)) for split in range(splits)]
    total = functools.reduce(operator.add, [totals[split, *place] for split in range(splits)])
    return functools.reduce(operator.add, parts) - total * keys, total
