"""Product-key addressing: scores, both codebooks' best, and their best pairs, in one operation."""

from pallas_kernels.product_top_k.api import product_top_k
from pallas_kernels.product_top_k.reference import Selection

__all__ = ["Selection", "product_top_k"]
