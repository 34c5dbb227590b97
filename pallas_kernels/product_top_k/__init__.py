"""Product-key addressing in one operation: scores, the best sub-keys and their best pairs."""

from pallas_kernels.product_top_k.api import select_slots
from pallas_kernels.product_top_k.reference import Selection

__all__ = ["Selection", "select_slots"]
