"""Product-key selection on a Hopper GPU: two Mosaic GPU kernels.

The first (`gpu_select`) finds every codebook's best sub-keys, the second (`gpu_merge`) the best
pairs of them.
"""

import jax

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.keys.addressing import Score, SubKeyChoice
from pallas_kernels.product_top_k import layout
from pallas_kernels.product_top_k.gpu_merge import THREADS, merge
from pallas_kernels.product_top_k.gpu_select import SUBKEYS, WIDTH, select


def choose_sub_keys(queries: Queries, keys: SubKeys, *, top_k: int, score: Score) -> SubKeyChoice:
    """The result of `keys.addressing.best_sub_keys`, by one kernel in float32."""
    tokens, subkeys = queries.shape[0], keys.shape[2]
    padded = layout.operands(
        queries, keys, token_tile=THREADS, subkey_tile=SUBKEYS, half_tile=WIDTH
    )
    found = select(*padded, subkeys=subkeys, top_k=top_k, score=score)
    return SubKeyChoice(*(layout.by_codebook(x, tokens) for x in found))


def pair_sub_keys(choice: SubKeyChoice, *, num_subkeys: int) -> tuple[jax.Array, jax.Array]:
    """The result of `keys.addressing.best_pairs`, by one kernel in float32."""
    tokens = choice.sub_key_ids.shape[0]
    padded = (layout.codebooks(x, token_tile=THREADS) for x in choice)
    ids, scores = merge(*padded, subkeys=num_subkeys)
    return layout.by_token(ids, tokens), layout.by_token(scores, tokens)
