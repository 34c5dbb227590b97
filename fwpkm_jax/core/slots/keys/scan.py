"""The keys of a memory over the chunks of a sequence, with a backward pass of its own.

Keys that never read the values move by themselves: per chunk, each query's best sub-keys are found,
and a step on the addressing loss moves the keys. So a scan over the chunks holds only what one
chunk needs of the one before. What any chunk can compute alone is computed for all chunks at once,
outside: the pairs of sub-keys, their weights, the losses, and in the backward pass the coefficients
of all steps and the cotangents of the queries.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.platform import platform
from fwpkm_jax.core.slots.keys.addressing import (
    Score,
    SubKeyChoice,
    split_halves,
)
from fwpkm_jax.core.slots.keys.gradients import (
    keys_cotangent,
    queries_cotangent,
    score_coefficients,
)
from fwpkm_jax.core.slots.keys.sums import dots_of_sub_keys, sub_key_totals, sum_of_sub_keys
from fwpkm_jax.core.slots.write import (
    KeyWrite,
    SubKeyUsage,
    addressing_coefficients,
    addressing_gradient,
    of_chosen,
    sub_key_access,
    sub_key_usage,
    usage_slopes,
)


class StepSums(NamedTuple):
    """Sums over a chunk's tokens that its step made; of all chunks, leaves `[chunks, ...]`.

    Attributes:
      access: `SubKeyUsage.access`, `[2, subkeys]`.
      totals: sums of the coefficients, `[heads, 2, subkeys]`.
    """

    access: jax.Array
    totals: jax.Array


Find = Callable[[Queries, SubKeys], SubKeyChoice]
"""From queries and keys to the best sub-keys of each query."""


class KeyScanOutput(NamedTuple):
    """What a scan of the keys leaves.

    Attributes:
      keys: after the last chunk.
      choice: the best sub-keys of every token, leaves `[chunks, tokens, ...]`.
    """

    keys: SubKeys
    choice: SubKeyChoice


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def key_scan(
    keys: SubKeys,
    queries: Float[Array, "chunks tokens heads key"],
    token_weights: Float[Array, "chunks tokens"],
    find: Find,
    key_write: KeyWrite,
    loops: "KeyLoops",
) -> KeyScanOutput:
    """Finds the best sub-keys of every chunk, and moves the keys after each.

    Args:
      keys: before the first chunk, `[heads, 2, subkeys, key // 2]`.
      queries: of every token, in the dtype of the keys; or in a narrower one, where kernels read it
        as it is: the results are those of the same numbers in the keys' dtype.
      token_weights: weight of each token in the addressing loss's average.
      find: from queries and keys to the best sub-keys.
      key_write: how the keys move, without `clip`, which the backward pass does not know; its score
        is that of `find`.
      loops: what goes over the chunks: plain XLA, as `KeyLoops()`, or kernels.
    """
    return loops.forward(find, key_write, keys, queries, token_weights)[0]


def _forward(
    find: Find, key_write: KeyWrite, keys: SubKeys, queries: jax.Array, token_weights: jax.Array
) -> tuple[KeyScanOutput, jax.Array, StepSums | None]:
    """The scan, the keys before each chunk, and the sums of all steps; None: not kept."""
    queries = queries.astype(keys.dtype)

    def body(keys, chunk):
        query, weights = chunk
        choice = find(query, keys)
        # By formula, not by `jax.grad`: training differentiates through this step once more.
        gradient = key_write.gradient(keys, query, choice, token_weights=weights)
        return key_write.step(keys, gradient), (choice, keys)

    keys, (choice, before) = jax.lax.scan(body, keys, (queries, token_weights))
    return KeyScanOutput(keys, choice), before, None


def _scan_forward(keys, queries, token_weights, find, key_write, loops):
    out, before, sums = loops.forward(find, key_write, keys, queries, token_weights)
    return out, (before, queries, token_weights, out.choice, sums)


class ScannedChunk(NamedTuple):
    """What the backward pass knows of a chunk before it begins.

    Attributes:
      keys, query, weights, choice: of the chunk; keys before it.
      scores_bar: what later computations send back to the chosen scores.
    """

    keys: SubKeys
    query: Queries
    weights: jax.Array
    choice: SubKeyChoice
    scores_bar: jax.Array


class KeyStep(NamedTuple):
    """How the step of a chunk came about.

    Three fields are functions that `jax.vjp` gave. They are pytrees, whose leaves are the arrays
    that the backward pass needs: `vmap` makes those of all chunks at once, and a scan takes one
    chunk's out of them.

    Attributes:
      coefficients: how strongly it pulled each chosen sub-key to the token's query.
      totals: sums of these, `[heads, 2, subkeys]`.
      of_coefficients: from the cotangent of `coefficients` to those of scores and slopes.
      of_slopes: from the cotangent of the sub-keys' slopes to that of their usage.
      of_access: from the cotangent of the tokens' access to that of the scores.
    """

    coefficients: jax.Array
    totals: jax.Array
    of_coefficients: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    of_slopes: Callable[[jax.Array], tuple[SubKeyUsage]]
    of_access: Callable[[jax.Array], tuple[jax.Array]]


def _step_of(chunk: ScannedChunk, sums: StepSums | None, *, score: Score) -> KeyStep:
    (ids, scores), num_subkeys = chunk.choice, chunk.keys.shape[2]
    if sums is None:
        usage = sub_key_usage(chunk.choice, num_subkeys=num_subkeys, token_weights=chunk.weights)
    else:
        usage = SubKeyUsage(sums.access, ids.shape[1] * jnp.sum(chunk.weights))

    coefficients_of = functools.partial(
        addressing_coefficients, token_weights=chunk.weights, usage=usage, score=score
    )
    # Linear maps at the point of each chunk: a scan backwards only applies them.
    slopes, of_slopes = jax.vjp(usage_slopes, usage)
    coefficients, of_coefficients = jax.vjp(coefficients_of, scores, of_chosen(slopes, ids))
    _, of_access = jax.vjp(lambda scores: sub_key_access(scores, chunk.weights), scores)
    totals = sub_key_totals(coefficients, ids, num_subkeys) if sums is None else sums.totals
    return KeyStep(coefficients, totals, of_coefficients, of_slopes, of_access)


def _scan_backward(find, key_write, loops, residuals, cotangents):
    """Goes from the last chunk to the first; only what depends on the keys' cotangent is inside."""
    return _scan_back(key_write, loops.backward, loops.to_queries, residuals, cotangents)


# `jit` traces this once for equal arguments, so a model with several memories lowers it once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _scan_back(key_write, loop, to_queries, residuals, cotangents):
    before, queries, token_weights, choice, sums = residuals
    score = key_write.score
    # All that no chunk needs of a later one is computed for all chunks at once, before the loop.
    chunks = ScannedChunk(before, queries, token_weights, choice, cotangents.choice.sub_key_scores)
    steps = jax.vmap(functools.partial(_step_of, score=score))(chunks, sums)
    keys_bar, (gradient_bar, coefficients) = loop(key_write, cotangents.keys, chunks, steps)
    queries_bar = to_queries(key_write, chunks, steps.coefficients, gradient_bar, coefficients)
    weights_bar = _by_chunks(functools.partial(_weights_cotangent, score=score))(
        chunks._replace(query=queries.astype(before.dtype)), gradient_bar
    )
    return keys_bar, queries_bar.astype(queries.dtype), weights_bar


key_scan.defvjp(_scan_forward, _scan_backward)


def _backward(
    key_write: KeyWrite, keys_bar: SubKeys, chunks: ScannedChunk, steps: KeyStep
) -> tuple[SubKeys, tuple[jax.Array, jax.Array]]:
    """Cotangents of the first keys and of all gradients, and `score_coefficients` of all chunks.

    Args:
      keys_bar: of the keys after the last chunk.
      chunks: leaves `[chunks, ...]`.
      steps: of all chunks, leaves `[chunks, ...]`.
    """
    score = key_write.score
    chunks = chunks._replace(query=chunks.query.astype(chunks.keys.dtype))

    def body(keys_bar, chunk_and_step):
        chunk, step = chunk_and_step
        ids = chunk.choice.sub_key_ids
        # The step is linear in keys and gradient, so that its cotangents need neither.
        _, of_step = jax.vjp(key_write.step, chunk.keys, jnp.zeros_like(chunk.keys))
        # From here on `keys_bar` belongs to the keys before the step.
        keys_bar, gradient_bar = of_step(keys_bar)
        gradient_bar = key_write.loss_weight * gradient_bar
        coefficients_bar = dots_of_sub_keys(split_halves(chunk.query), ids, gradient_bar)
        if score == "idw":
            products = jnp.sum(gradient_bar * chunk.keys, axis=-1)
            coefficients_bar = coefficients_bar - of_chosen(products, ids)
        coefficients = coefficients_of_scores(chunk, step, coefficients_bar, score=score)
        keys_bar = keys_bar + keys_cotangent(
            chunk.query, chunk.keys, ids, coefficients, score=score
        )
        if score == "idw":
            keys_bar = keys_bar - step.totals[..., None] * gradient_bar
        return keys_bar, (gradient_bar, coefficients)

    return jax.lax.scan(body, keys_bar, (chunks, steps), reverse=True)


def coefficients_of_scores(
    chunk: ScannedChunk,
    step: KeyStep,
    coefficients_bar: jax.Array,
    *,
    score: Score,
    totals_of: Callable[[jax.Array], jax.Array] | None = None,
) -> Float[Array, "tokens heads 2 top_k"]:
    """`score_coefficients` of the chosen scores, from the cotangents of the step's coefficients.

    Args:
      step: how it came about.
      totals_of: what sums numbers of the chosen sub-keys over tokens and heads, `[2, subkeys]`;
        None: plain XLA.
    """
    ids, scores = chunk.choice
    scores_bar, slopes_bar = step.of_coefficients(coefficients_bar)
    if totals_of is None:
        slopes_bar = sub_key_totals(slopes_bar, ids, chunk.keys.shape[2]).sum(0)
    else:
        slopes_bar = totals_of(slopes_bar)
    (usage_bar,) = step.of_slopes(slopes_bar)
    scores_bar = scores_bar + step.of_access(of_chosen(usage_bar.access, ids))[0]
    return score_coefficients(scores, chunk.scores_bar + scores_bar, score=score)


def _to_queries(
    key_write: KeyWrite,
    chunks: ScannedChunk,
    step_coefficients: jax.Array,
    gradient_bar: jax.Array,
    coefficients: jax.Array,
) -> Float[Array, "chunks tokens heads key"]:
    """The cotangents of all queries, once all others are known.

    Args:
      chunks: leaves `[chunks, ...]`.
      step_coefficients: `KeyStep.coefficients` of all chunks.
      gradient_bar: the cotangents of all chunks' gradients.
      coefficients: `score_coefficients` of all chunks.
    """

    def of_chunk(
        chunk: ScannedChunk,
        step_coefficients: jax.Array,
        gradient_bar: SubKeys,
        coefficients: jax.Array,
    ) -> Queries:
        ids = chunk.choice.sub_key_ids
        # The step pulls sub-keys to the query, so their cotangents come back by its coefficients.
        query_bar = sum_of_sub_keys(step_coefficients, ids, gradient_bar).reshape(chunk.query.shape)
        return query_bar + queries_cotangent(
            chunk.query, chunk.keys, ids, coefficients, score=key_write.score
        )

    chunks = chunks._replace(query=chunks.query.astype(chunks.keys.dtype))
    return _by_chunks(of_chunk)(chunks, step_coefficients, gradient_bar, coefficients)


@dataclass(frozen=True)
class KeyLoops:
    """The functions that go over the chunks; each has the signature and meaning of its default."""

    forward: Callable[..., tuple[KeyScanOutput, jax.Array, StepSums | None]] = _forward
    backward: Callable[..., tuple[SubKeys, tuple[jax.Array, jax.Array]]] = _backward
    to_queries: Callable[..., jax.Array] = _to_queries


def _weights_cotangent(chunk: ScannedChunk, gradient_bar: SubKeys, *, score: Score) -> jax.Array:
    """The cotangents of a chunk's weights from those of its gradient."""

    _, of_gradient = jax.vjp(
        lambda weights: addressing_gradient(
            chunk.query, chunk.keys, chunk.choice, token_weights=weights, score=score
        ),
        chunk.weights,
    )
    return of_gradient(gradient_bar)[0]


def _by_chunks(of_chunk: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`of_chunk` of all chunks: on a CPU one at a time, which fits the cache, else at once."""
    # A CPU is bound by its cache, an accelerator by the number of launches.
    if platform() == "cpu":
        return lambda *chunks: jax.lax.map(lambda chunk: of_chunk(*chunk), chunks)
    return jax.vmap(of_chunk)
