"""Mosaic GPU kernels that move rows of sub-keys, one warpgroup per token or sub-key."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import launch, row


def step(
    history: Any, chunk: jax.Array, sums: jax.Array, totals: jax.Array, *, keep: float, move: float
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The sub-keys after a chunk's step, and what the next chunk's selection needs of them.

    Args:
      history: the ref of the sub-keys before each chunk and after the last,
        `[chunks + 1, codebooks, subkeys, half]`; the next ones are written.
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

    def body(program, chunk, sums, totals, history, *outs):
        *terms, norms = outs
        chunk, place = chunk[0], (program // subkeys, program % subkeys)
        old = row(history, (chunk, *place))
        gradient = _summed(sums, totals, place, splits, old)
        new = keep * old + move * gradient
        history[chunk + 1, *place] = new
        norms[place] = jnp.sum(new * new)
        for ref in terms:
            term = new.astype(jnp.bfloat16)
            ref[place] = term
            new = new - term.astype(jnp.float32)

    term = jax.ShapeDtypeStruct((codebooks, subkeys, half), jnp.bfloat16)
    *terms, norms = launch(
        body,
        *(chunk, sums, totals, history),
        programs=codebooks * subkeys,
        out_type=[term] * 3 + [jax.ShapeDtypeStruct((codebooks, subkeys), jnp.float32)],
        name="key_scan_step",
    )
    return tuple(terms), norms


def pulls_back(
    queries: jax.Array,
    chunk: jax.Array,
    history: jax.Array,
    bars: jax.Array,
    ids: jax.Array,
    *,
    move: float,
) -> jax.Array:
    """The cotangents of a chunk's pulls, `[codebooks, top_k, tokens]`.

    Args:
      queries: `[chunks, tokens, codebooks, half]`.
      chunk: which of the chunks, `[1]`.
      history: the sub-keys before each chunk, `[chunks, codebooks, subkeys, half]`.
      bars: cotangents of the sub-keys before each chunk and after the last.
      ids: the chosen sub-keys, `[chunks, codebooks, top_k, tokens]`.
      move: multiplies the gradient in the step.
    """
    _, codebooks, top_k, tokens = ids.shape

    def body(token, queries, chunk, history, bars, ids, out):
        chunk = chunk[0]
        for codebook in range(codebooks):
            query = row(queries, (chunk, token, codebook))
            chosen = [ids[chunk, codebook, place, token] for place in range(top_k)]
            keys = [row(history, (chunk, codebook, one)) for one in chosen]
            of_keys = [row(bars, (chunk + 1, codebook, one)) for one in chosen]
            for place, (key, bar) in enumerate(zip(keys, of_keys, strict=True)):
                out[codebook, place, token] = move * jnp.sum((query - key) * bar)

    (out,) = launch(
        body,
        *(queries, chunk, history, bars, ids),
        programs=tokens,
        out_type=[jax.ShapeDtypeStruct((codebooks, top_k, tokens), jnp.float32)],
        name="key_scan_pulls_back",
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
) -> None:
    """Writes the cotangents of the sub-keys before a chunk.

    Args:
      bars: the ref of the cotangents of the sub-keys before each chunk and after the last,
        `[chunks + 1, codebooks, subkeys, half]`.
      chunk: which of the chunks, `[1]`.
      history: the sub-keys before each chunk, `[chunks, codebooks, subkeys, half]`.
      step_totals: sums of the pulls of the chunks' steps, `[chunks, codebooks, subkeys]`.
      sums: as for `step`, of the pulls that the scores' cotangents cause.
      totals: likewise.
      keep: as for `step`.
      move: likewise.
    """
    splits, codebooks, subkeys, _ = sums.shape

    def body(program, chunk, history, step_totals, sums, totals, bars):
        chunk, place = chunk[0], (program // subkeys, program % subkeys)
        after = row(bars, (chunk + 1, *place))
        gradient = _summed(sums, totals, place, splits, row(history, (chunk, *place)))
        kept = keep - move * step_totals[chunk, *place]
        bars[chunk, *place] = kept * after - gradient

    launch(
        body,
        *(chunk, history, step_totals, sums, totals, bars),
        programs=codebooks * subkeys,
        name="key_scan_step_back",
    )


def _summed(sums, totals, place, splits, keys):
    """The sum over tokens of `pull * (query - sub-key)` for one sub-key."""
    parts = [row(sums, (split, *place)) for split in range(splits)]
    total = functools.reduce(operator.add, [totals[split, *place] for split in range(splits)])
    return functools.reduce(operator.add, parts) - total * keys
