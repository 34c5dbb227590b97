"""The gated delta rule in chunks, forward and backward."""

from pallas_kernels.gated_delta.api import chunk_gated_delta_rule as chunk_gated_delta_rule
