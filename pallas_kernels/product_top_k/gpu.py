"""Product-key selection on a Hopper GPU: two Mosaic GPU kernels.

The first (`gpu_select`) finds every codebook's best sub-keys, the second (`gpu_merge`) the best
pairs of them.
"""

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.addressing import Address, Score
from pallas_kernels.product_top_k import layout
from pallas_kernels.product_top_k.gpu_merge import THREADS, merge
from pallas_kernels.product_top_k.gpu_select import SUBKEYS, WIDTH, select


def address(queries: Queries, keys: SubKeys, *, top_k: int, score: Score) -> Address:
    """The result of `reference.address`, computed by two Mosaic GPU kernels in float32."""
    tokens, subkeys = queries.shape[0], keys.shape[2]
    padded = layout.operands(
        queries, keys, token_tile=THREADS, subkey_tile=SUBKEYS, half_tile=WIDTH
    )
    sub_key_ids, sub_key_scores = select(*padded, subkeys=subkeys, top_k=top_k, score=score)
    slot_ids, slot_scores = merge(sub_key_ids, sub_key_scores, subkeys=subkeys)
    return layout.address(slot_ids, slot_scores, sub_key_ids, sub_key_scores, tokens=tokens)
