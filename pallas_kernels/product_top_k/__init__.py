"""Product-key addressing in one operation: scores, the best sub-keys, and their best pairs."""

from pallas_kernels.product_top_k.api import product_top_k
from pallas_kernels.product_top_k.reference import Selection

__all__ = ["Selection", "product_top_k"]
