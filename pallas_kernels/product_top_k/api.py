"""`select_slots`: chooses an implementation of the operation and defines its derivatives."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.keys.addressing import (
    Address,
    Nonlinearity,
    Normalization,
    Score,
    SubKeyChoice,
    best_pairs,
    best_sub_keys,
    slot_weights,
)
from fwpkm_jax.core.slots.keys.gradients import (
    keys_cotangent,
    queries_cotangent,
    score_coefficients,
)
from pallas_kernels.dispatch import (
    Backend,
    Implementation,
    Kernel,
    Operation,
    custom_vjp,
    module_of,
)
from pallas_kernels.refusals import refusal

WIDEST_HALF = {"gpu": 320, "tpu": 512}
"""Largest supported width of half a query. A GPU program keeps three bfloat16 terms of 64 halves
and two tiles of keys in shared memory: 221,184 of 232,448 bytes at 320 columns."""


class Selection(NamedTuple):
    """The slots that each query reads, and their weights.

    Attributes:
      address: best slots and best sub-keys with their scores.
      weights: read weights of the best slots.
    """

    address: Address
    weights: Float[Array, "tokens heads top_k"]


def select_slots(
    queries: Queries,
    keys: SubKeys,
    *,
    top_k: int,
    score: Score = "idw",
    normalization: Normalization = "token",
    nonlinearity: Nonlinearity = "softmax",
    temperature: float = 1.0,
    backend: Backend = "auto",
) -> Selection:
    """Each query's best slots and their read weights, without a score matrix in device memory.

    The kernels score a tile of tokens against one codebook after the other and keep the best
    sub-keys of each. Then they merge the pairs with ranks i and j (from 1) for which i j <= top_k.
    Scores have float32 accuracy. Among equal scores the lower sub-key wins, then the lower slot.
    Gradients flow through the chosen scores only, so no score matrix is stored for them. The
    operation can be differentiated twice, batched and scanned over.

    Args:
      queries: `[tokens, heads, key]`; the first half of `key` addresses rows.
      keys: `[heads, 2, subkeys, key // 2]`, rows first.
      top_k: slots per head, at most `subkeys`.
      score: `idw` or `dot`, see `core.slots.keys.addressing.sub_key_scores`.
      normalization: see `core.slots.keys.addressing.slot_weights`, also for the next two arguments.
      nonlinearity: function from slot scores to weights.
      temperature: divides the slot scores.
      backend: as of `dispatch.Operation.choose`; kernels accept float32 only.

    Returns:
      The address of `keys.addressing.product_top_k` and the weights `[tokens, heads, top_k]`.

    Raises:
      ValueError: as `keys.addressing.product_top_k`.

    References: Lample et al. 2019, arXiv:1907.05242; Zhao and Jones 2026, arXiv:2601.00671.
    """
    choice = choose_sub_keys(queries, keys, top_k=top_k, score=score, backend=backend)
    slot_ids, slot_scores = pair_sub_keys(choice, num_subkeys=keys.shape[2], backend=backend)
    # The softmax over a few scores is left to XLA, which fuses it with what follows.
    weights = slot_weights(
        slot_scores,
        normalization=normalization,
        nonlinearity=nonlinearity,
        temperature=temperature,
    )
    return Selection(Address(slot_ids, slot_scores, *choice), weights)


def choose_sub_keys(
    queries: Queries,
    keys: SubKeys,
    *,
    top_k: int,
    score: Score = "idw",
    backend: Backend = "auto",
) -> SubKeyChoice:
    """The first half of `select_slots`: each codebook's best sub-keys.

    A scan whose keys move chunk by chunk needs no more; see `pair_sub_keys` for the rest.
    """
    chosen = CHOOSE.choose(backend, queries, keys, top_k=top_k)
    return _choose(chosen, top_k, score, queries, keys)


def pair_sub_keys(
    choice: SubKeyChoice, *, num_subkeys: int, backend: Backend = "auto"
) -> tuple[jax.Array, jax.Array]:
    """The second half of `select_slots`: ids and scores of the best slots, of any number of tokens.

    Differentiable in the scores. Arguments and results as `core.slots.keys.addressing.best_pairs`.
    """
    chosen = PAIR.choose(backend, choice, num_subkeys=num_subkeys)
    return _pair(chosen, num_subkeys, *choice)


@custom_vjp(fixed=3)
def _choose(
    chosen: Implementation, top_k: int, score: Score, queries: Queries, keys: SubKeys
) -> SubKeyChoice:
    """The best sub-keys by one implementation; gradients flow through their scores alone."""
    if chosen == "reference":
        return best_sub_keys(queries, keys, top_k=top_k, score=score)
    kernels = module_of("product_top_k", chosen)
    return kernels.choose_sub_keys(queries, keys, top_k=top_k, score=score)


def _choose_forward(chosen, top_k, score, queries, keys):
    # This calls the differentiable function, not the kernel, so that second derivatives exist.
    choice = _choose(chosen, top_k, score, queries, keys)
    return choice, (queries, keys, choice)


def _choose_backward(chosen, top_k, score, residuals, cotangents):
    queries, keys, (ids, scores) = residuals
    pulls = score_coefficients(scores, cotangents[1], score=score)
    to_queries = queries_cotangent(queries, keys, ids, pulls, score=score)
    return to_queries, keys_cotangent(queries, keys, ids, pulls, score=score)


_choose.defvjp(_choose_forward, _choose_backward)


@custom_vjp(fixed=2)
def _pair(
    chosen: Implementation, num_subkeys: int, ids: jax.Array, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Ids and scores of the best slots by one implementation."""
    choice = SubKeyChoice(ids, scores)
    if chosen == "reference":
        return best_pairs(choice, num_subkeys=num_subkeys)
    return module_of("product_top_k", chosen).pair_sub_keys(choice, num_subkeys=num_subkeys)


def _pair_forward(chosen, num_subkeys, ids, scores):
    slot_ids, slot_scores = _pair(chosen, num_subkeys, ids, scores)
    return (slot_ids, slot_scores), (slot_ids, ids)


def _pair_backward(chosen, num_subkeys, residuals, cotangents):
    slot_ids, sub_key_ids = residuals
    # A slot's score is the sum of its two sub-keys', so both get its cotangent.
    row, column = slot_ids // num_subkeys, slot_ids % num_subkeys
    sub_keys = jnp.stack([row, column], axis=2)  # [tokens, heads, 2, top_k]
    same = sub_key_ids[..., :, None] == sub_keys[..., None, :]
    return None, jnp.sum(jnp.where(same, cotangents[1][:, :, None, None, :], 0.0), axis=-1)


_pair.defvjp(_pair_forward, _pair_backward)


def refuses(
    kernel: Kernel,
    queries: jax.Array | jax.ShapeDtypeStruct,
    keys: jax.Array | jax.ShapeDtypeStruct,
    *,
    top_k: int,
) -> str | None:
    """None, or why the kernel that chooses sub-keys does not take these arrays."""
    # Shapes that make no sense are refused in the words of the reference.
    jax.eval_shape(functools.partial(best_sub_keys, top_k=top_k), queries, keys)
    (subkeys, half), widest = keys.shape[2:], WIDEST_HALF[kernel]
    dtypes = {str(queries.dtype), str(keys.dtype)}
    large = subkeys > 1024 or top_k > 32 or half > widest
    return refusal(
        (dtypes != {"float32"}, f"dtypes {queries.dtype} and {keys.dtype}; both must be float32"),
        (queries.shape[0] == 0, "0 tokens"),
        (large, f"subkeys={subkeys}, top_k={top_k}, half={half}; at most 1024, 32 and {widest}"),
    )


def _refuses_pairs(_: Kernel, choice: SubKeyChoice, *, num_subkeys: int) -> str | None:
    dtype, tokens, top_k = (choice.sub_key_scores.dtype, *choice.sub_key_ids.shape[::3])
    large = num_subkeys > 1024 or top_k > 32
    return refusal(
        (dtype != jnp.float32, f"scores in {dtype}; they must be float32"),
        (tokens == 0, "0 tokens"),
        (large, f"subkeys={num_subkeys}, top_k={top_k}; at most 1024 and 32"),
    )


_CHECK = "pallas_kernels.product_top_k.specs:check"
CHOOSE = Operation("product_top_k", refuses, check=_CHECK)
PAIR = Operation("product_top_k", _refuses_pairs, check=_CHECK)
