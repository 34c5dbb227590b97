"""Product-key addressing in one operation: scores, the best sub-keys and their best pairs."""

from pallas_kernels.product_top_k.api import choose_sub_keys, pair_sub_keys, select_slots
from pallas_kernels.product_top_k.reference import Selection

__all__ = ["Selection", "choose_sub_keys", "pair_sub_keys", "select_slots"]
