"""Cross-entropies of rows of logits and their gradients, in one pass over each row."""

from pallas_kernels.cross_entropy.api import row_cross_entropy as row_cross_entropy
