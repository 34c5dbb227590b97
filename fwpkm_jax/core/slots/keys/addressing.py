"""Product-key addressing: from queries to the best slots.

A slot is a pair (row sub-key, column sub-key); its score is the sum of both sub-keys' scores.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.platform import platform

Score = Literal["idw", "dot"]
Nonlinearity = Literal["softmax", "silu", "relu"]
Normalization = Literal["token", "head"]

IDW_EPSILON = 1e-3  # Keeps the logarithm finite where a query sits on a sub-key.
_GROUP = 8  # Size of the groups of neighbouring scores whose maxima are compared first.


class SubKeyChoice(NamedTuple):
    """The best sub-keys of each query.

    Attributes:
      sub_key_ids: best sub-keys of each codebook, best first; index 0 of axis 2 is the rows.
      sub_key_scores: their scores.
    """

    sub_key_ids: Int[Array, "tokens heads 2 top_k"]
    sub_key_scores: Float[Array, "tokens heads 2 top_k"]


class Address(NamedTuple):
    """Where each query reads.

    Attributes:
      slot_ids: best slots of each head, best first.
      slot_scores: their scores, unnormalised.
      sub_key_ids: best sub-keys of each codebook, best first; index 0 of axis 2 is the rows.
      sub_key_scores: their scores.
    """

    slot_ids: Int[Array, "tokens heads top_k"]
    slot_scores: Float[Array, "tokens heads top_k"]
    sub_key_ids: Int[Array, "tokens heads 2 top_k"]
    sub_key_scores: Float[Array, "tokens heads 2 top_k"]


def split_halves(queries: Queries) -> Float[Array, "tokens heads 2 half"]:
    """The halves of each query that address rows and columns, `[tokens, heads, 2, key // 2]`."""
    tokens, heads, key = queries.shape
    return queries.reshape(tokens, heads, 2, key // 2)


def sub_key_scores(
    queries: Queries, keys: SubKeys, *, score: Score = "idw"
) -> Float[Array, "tokens heads 2 subkeys"]:
    """Scores of every sub-key of both codebooks for every query.

    `idw` is the inverse-distance weight -log(1e-3 + ||q - k||^2), `dot` the inner product.

    Args:
      queries: `[tokens, heads, key]`; the first half of `key` addresses rows.
      keys: `[heads, 2, subkeys, key // 2]`, rows first.

    References: Zhao and Jones 2026, arXiv:2601.00671, Eqs. 5 and 20.
    """
    return jnp.moveaxis(_scores(queries, keys, score), 3, 0)


def product_top_k(queries: Queries, keys: SubKeys, *, top_k: int, score: Score = "idw") -> Address:
    """Finds each query's best slots without scoring all `subkeys**2` of them.

    The best pairs lie among the best rows times the best columns, and of those only pairs of ranks
    i * j <= top_k can win: 20 sums for top_k = 8. Equal scores go to the lower sub-key, then to the
    lower slot. Differentiable in queries and keys through the scores.

    Args:
      queries: `[tokens, heads, key]`; the first half of `key` addresses rows.
      keys: `[heads, 2, subkeys, key // 2]`, rows first.
      top_k: slots per head, at most `subkeys`.
      score: `idw` or `dot`, see `sub_key_scores`.

    Returns:
      An `Address`; slot ids are `row * subkeys + column`.

    Raises:
      ValueError: `top_k` exceeds `subkeys`, or the key widths differ.

    References: Lample et al. 2019, arXiv:1907.05242; Zhao and Jones 2026, arXiv:2601.00671.
    """
    choice = best_sub_keys(queries, keys, top_k=top_k, score=score)
    return Address(*best_pairs(choice, num_subkeys=keys.shape[2]), *choice)


def best_sub_keys(
    queries: Queries, keys: SubKeys, *, top_k: int, score: Score = "idw"
) -> SubKeyChoice:
    """The first half of `product_top_k`: each codebook's best sub-keys."""
    check_arrays(
        keys=(keys, "float heads codebooks subkeys half"),
        queries=(queries, "float tokens heads key"),
        sizes={"codebooks": 2, "tokens": queries.shape[0]}  # No token at all is no mistake here.
        | ({"key": 2 * keys.shape[3]} if keys.ndim == 4 else {}),
    )
    subkeys = keys.shape[2]
    if top_k > subkeys:
        raise ValueError(f"top_k={top_k} exceeds the {subkeys} sub-keys per codebook; lower top_k.")
    scores = _scores(queries, keys, score)
    sub_key_ids = top_k_ids(scores, top_k)
    # The gather gives the chosen scores their gradient; the ids have none.
    best = jnp.moveaxis(jnp.take_along_axis(scores, sub_key_ids, axis=2), 3, 0)
    return SubKeyChoice(jnp.moveaxis(sub_key_ids, 3, 0), best)


def best_pairs(
    choice: SubKeyChoice, *, num_subkeys: int
) -> tuple[Int[Array, "tokens heads top_k"], Float[Array, "tokens heads top_k"]]:
    """The second half of `product_top_k`: ids and scores of the best slots."""
    sub_key_ids, best = choice
    top_k = best.shape[3]
    row_ranks, column_ranks = _candidate_ranks(top_k)
    # Ranks are NumPy constants, so that XLA gathers by static indices.
    sums = best[:, :, 0, row_ranks] + best[:, :, 1, column_ranks]
    slots = sub_key_ids[:, :, 0, row_ranks] * num_subkeys + sub_key_ids[:, :, 1, column_ranks]
    places = _best_places(jax.lax.stop_gradient(sums), slots, top_k)
    slot_ids = jnp.take_along_axis(slots, places, axis=-1)
    return slot_ids, jnp.take_along_axis(sums, places, axis=-1)


def slot_weights(
    scores: Float[Array, "tokens heads top_k"],
    *,
    normalization: Normalization = "token",
    nonlinearity: Nonlinearity = "softmax",
    temperature: float = 1.0,
) -> Float[Array, "tokens heads top_k"]:
    """Read weights of the chosen slots.

    Args:
      normalization: `token` takes one softmax over all heads (FwPKM), `head` one per head (PKM).
      nonlinearity: `softmax`, or an elementwise `silu` or `relu` that ignores `normalization`.
      temperature: divides the scores.
    """
    if nonlinearity == "silu":
        return jax.nn.silu(scores / temperature)
    if nonlinearity == "relu":
        return jax.nn.relu(scores / temperature)
    axis = (-2, -1) if normalization == "token" else -1
    if temperature != 1:
        scores = _tempered(scores, temperature, axis)
    return jax.nn.softmax(scores, axis=axis)


def _tempered(scores: jax.Array, temperature: float, axis: int | tuple[int, int]) -> jax.Array:
    # The best score becomes 0 first, so that no temperature overflows, gradients included.
    temperature = max(temperature, float(jnp.finfo(jnp.float32).tiny))
    scores = scores - jax.lax.stop_gradient(jnp.max(scores, axis=axis, keepdims=True))
    return jnp.where(scores == 0, scores, scores / temperature)


def _scores(
    queries: Queries, keys: SubKeys, score: Score
) -> Float[Array, "heads 2 subkeys tokens"]:
    """`sub_key_scores` in the order in which the best are found; another order costs a pass."""
    halves = jnp.moveaxis(split_halves(queries), 0, 2)
    # Full precision, norms outside the product: a distance is a difference of large numbers.
    products = jnp.einsum("hpsk,hptk->hpst", keys, halves, precision=jax.lax.Precision.HIGHEST)
    if score == "dot":
        return products
    query_norms = jnp.sum(halves**2, axis=-1)[:, :, None]
    key_norms = jnp.sum(keys**2, axis=-1)[..., None]
    distances = jnp.maximum(query_norms + key_norms - 2.0 * products, 0.0)
    return -jnp.log(IDW_EPSILON + distances)


def _best_places(
    sums: Float[Array, "tokens heads candidates"],
    slots: Int[Array, "tokens heads candidates"],
    top_k: int,
) -> Int[Array, "tokens heads top_k"]:
    """Where the best candidates stand, best first, the lower slot first among equals.

    Each candidate's rank is the number of those before it: for a few dozen candidates that takes
    a tenth of a sort's time.
    """
    mine, other = sums[..., :, None], sums[..., None, :]
    lower = slots[..., None, :] < slots[..., :, None]
    rank = jnp.sum((other > mine) | ((other == mine) & lower), axis=-1)
    wanted = jax.lax.broadcasted_iota(rank.dtype, (*rank.shape[:-1], top_k, 1), rank.ndim - 1)
    return jnp.argmax(rank[..., None, :] == wanted, axis=-1)


def _candidate_ranks(top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank pairs (from 0) that can be among the best `top_k`: fewer pairs surely come first."""
    rows, columns = np.divmod(np.arange(top_k * top_k), top_k)
    # A pair of ranks (i, j) comes behind i * j - 1 others at least; docs/explanation/math.md.
    keep = (rows + 1) * (columns + 1) <= top_k
    return rows[keep], columns[keep]


def top_k_ids(
    scores: Float[Array, "*batch choices tokens"], k: int
) -> Int[Array, "*batch {k} tokens"]:
    """Ids of each token's `k` largest scores, best first; of equal scores the lower id comes first.

    Like `jax.lax.top_k`, but along the second last axis, without a gradient, and with 0 equal to
    -0.

    Args:
      scores: `[..., choices, tokens]`; a NaN counts as larger than every number.
      k: at most `choices`.
    """
    # top_k ranks 0 above -0, which are equal scores: without the sign the lower one wins.
    scores = jax.lax.stop_gradient(jnp.where(scores == 0.0, 0.0, scores))
    if platform() != "cpu":
        return jnp.swapaxes(jax.lax.top_k(jnp.swapaxes(scores, -1, -2), k)[1], -1, -2)
    # Tokens side by side suit a CPU's vector units. The best k scores lie in the k groups with the
    # largest maxima: if one lay outside, each of these groups would hold a better score.
    *batch, choices, tokens = scores.shape
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 2)
    if choices % _GROUP == 0 and choices // _GROUP > k:
        maxima = scores.reshape(*batch, choices // _GROUP, _GROUP, tokens).max(-2)
        groups = _one_by_one(maxima, ids[..., : choices // _GROUP, :], k)
        inside = (*batch, k, _GROUP, tokens)
        within = jax.lax.broadcasted_iota(jnp.int32, inside, len(inside) - 2)
        ids = (_GROUP * groups[..., None, :] + within).reshape(*batch, k * _GROUP, tokens)
        scores = jnp.take_along_axis(scores, ids, axis=-2)
    return _one_by_one(scores, ids, k)


def _one_by_one(scores: jax.Array, ids: jax.Array, k: int) -> jax.Array:
    """The ids of the `k` best, found one after the other; `ids` are the ids of the scores."""
    found = []
    for _ in range(k):
        best = scores == scores.max(-2, keepdims=True)
        # Of equal scores the lowest id, as `jax.lax.top_k` chooses.
        found.append(jnp.where(best, ids, jnp.iinfo(jnp.int32).max).min(-2, keepdims=True))
        # By id, not by score: an equal score stays for the next round.
        scores = jnp.where(ids == found[-1], -jnp.inf, scores)
    return jnp.concatenate(found, axis=-2)
