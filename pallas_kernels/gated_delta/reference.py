"""What the kernels compute: the chunk form of `fwpkm_jax.core.gated_delta`, in plain JAX."""

from fwpkm_jax.core.gated_delta import GatedDeltaOutput as GatedDeltaOutput
from fwpkm_jax.core.gated_delta import chunk_gated_delta_rule as chunk_gated_delta_rule
