"""Product-key selection on a TPU: one program scores a tile of tokens and finds its best sub-keys,
and a second one the best pairs of them.

Sub-keys are along sublanes and tokens along lanes. So a maximum over sub-keys is elementwise
between registers, and each result row holds one rank for all tokens of the tile.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.keys.addressing import IDW_EPSILON, Score, SubKeyChoice
from pallas_kernels import dispatch
from pallas_kernels.product_top_k import layout

_LANES, _SUBLANES = 128, 8
_FULL = jax.lax.Precision.HIGHEST  # Distances are differences of large numbers.


def choose_sub_keys(queries: Queries, keys: SubKeys, *, top_k: int, score: Score) -> SubKeyChoice:
    """The result of `keys.addressing.best_sub_keys`, computed by one Pallas call in float32."""
    tokens, heads, _ = queries.shape
    subkeys = keys.shape[2]
    token_tile = _token_tile(tokens, subkeys)
    padded = layout.operands(
        queries, keys, token_tile=token_tile, subkey_tile=_SUBLANES, half_tile=_LANES
    )
    padded_tokens = padded.queries.shape[0]
    _, padded_subkeys, half = padded.keys.shape
    ranks = pl.BlockSpec((2, top_k, token_tile), lambda head, tile: (head, 0, tile))
    shape = (heads * 2, top_k, padded_tokens)
    found = pl.pallas_call(
        functools.partial(_choose_kernel, subkeys=subkeys, top_k=top_k, score=score),
        grid=(heads, padded_tokens // token_tile),
        in_specs=[
            pl.BlockSpec((token_tile, 2 * half), lambda head, tile: (tile, head)),
            pl.BlockSpec((2, padded_subkeys, half), lambda head, tile: (head, 0, 0)),
        ],
        out_specs=[ranks, ranks],
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
        ],
        scratch_shapes=[pltpu.VMEM((padded_subkeys, token_tile), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=dispatch.interpreted(),
        name="product_top_k_select",
    )(*padded)  # fmt: skip
    return SubKeyChoice(*(layout.by_codebook(x, tokens) for x in found))


def pair_sub_keys(choice: SubKeyChoice, *, num_subkeys: int) -> tuple[jax.Array, jax.Array]:
    """The result of `keys.addressing.best_pairs`, computed by one Pallas call in float32."""
    tokens, heads, _, top_k = choice.sub_key_ids.shape
    token_tile = _token_tile(tokens, num_subkeys)
    padded = [layout.codebooks(x, token_tile=token_tile) for x in choice]
    padded_tokens = padded[0].shape[2]
    candidates = sum(layout.partners(top_k))
    candidates += -candidates % _SUBLANES

    def ranks(per_head: int) -> pl.BlockSpec:
        return pl.BlockSpec((per_head, top_k, token_tile), lambda head, tile: (head, 0, tile))

    shape = (heads, top_k, padded_tokens)
    ids, scores = pl.pallas_call(
        functools.partial(_pair_kernel, subkeys=num_subkeys, top_k=top_k),
        grid=(heads, padded_tokens // token_tile),
        in_specs=[ranks(2), ranks(2)],
        out_specs=[ranks(1), ranks(1)],
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
        ],
        scratch_shapes=[
            pltpu.VMEM((candidates, token_tile), jnp.float32),
            pltpu.VMEM((candidates, token_tile), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=dispatch.interpreted(),
        name="product_top_k_merge",
    )(*padded)  # fmt: skip
    return layout.by_token(ids, tokens), layout.by_token(scores, tokens)


def _token_tile(tokens: int, subkeys: int) -> int:
    return 256 if tokens > _LANES and subkeys <= 1024 else _LANES


def _choose_kernel(
    queries, keys, sub_key_ids, sub_key_scores, scores, *, subkeys: int, top_k: int, score: Score
):
    half = keys.shape[2]
    for codebook in range(2):
        scores[...] = _scores(
            queries[:, codebook * half : (codebook + 1) * half], keys[codebook], subkeys, score
        )
        sub_keys = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        _take_best(scores, sub_keys, sub_key_ids.at[codebook], sub_key_scores.at[codebook], top_k)


def _pair_kernel(
    sub_key_ids, sub_key_scores, slot_ids, slot_scores, sums, slots, *, subkeys: int, top_k: int
):
    sums[...] = jnp.full(sums.shape, -jnp.inf)
    slots[...] = jnp.zeros(slots.shape, jnp.int32)
    start = 0
    for row, count in enumerate(layout.partners(top_k)):
        pairs = pl.ds(start, count)
        sums[pairs, :] = sub_key_scores[0, row : row + 1, :] + sub_key_scores[1, :count, :]
        slots[pairs, :] = sub_key_ids[0, row : row + 1, :] * subkeys + sub_key_ids[1, :count, :]
        start += count
    _take_best(sums, slots[...], slot_ids.at[0], slot_scores.at[0], top_k)


def _scores(query: jax.Array, key: jax.Array, subkeys: int, score: Score) -> jax.Array:
    """Scores `[subkeys, tokens]` of one codebook; padded sub-keys score minus infinity."""
    contract_width = (((1,), (1,)), ((), ()))

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            left, right, contract_width, precision=_FULL, preferred_element_type=jnp.float32
        )

    scores = product(key, query)
    if score == "idw":
        key_norms = jnp.sum(key * key, axis=1, keepdims=True)
        # A product with ones leaves the sums along lanes; a plain sum leaves them along sublanes.
        ones = jnp.ones((_SUBLANES, query.shape[1]), jnp.float32)
        query_norms = product(ones, query * query)[:1]
        distances = jnp.maximum(query_norms + key_norms - 2.0 * scores, 0.0)
        scores = -jnp.log(IDW_EPSILON + distances)
    if key.shape[0] == subkeys:
        return scores
    sub_keys = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    return jnp.where(sub_keys < subkeys, scores, -jnp.inf)


def _take_best(scores, ids: jax.Array, best_ids, best_scores, top_k: int) -> None:
    """Moves each column's best scores to the results; among equal scores the lower id is first."""

    def take(rank: jax.Array, _: None) -> None:
        best = jnp.max(scores[...], axis=0, keepdims=True)
        behind_all = jnp.int32(2**31 - 1)
        chosen = jnp.min(jnp.where(scores[...] == best, ids, behind_all), axis=0, keepdims=True)
        # NaN is not equal to any score; then use slot 0, so that ids stay in the table.
        best_ids[pl.ds(rank, 1), :] = jnp.where(chosen == behind_all, 0, chosen)
        best_scores[pl.ds(rank, 1), :] = best
        scores[...] = jnp.where(ids == chosen, -jnp.inf, scores[...])

    jax.lax.fori_loop(0, top_k, take, None)
