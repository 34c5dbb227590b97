"""The kernels' definition in plain JAX: `fwpkm_jax.core.recurrence.gated_delta` by chunks."""

from fwpkm_jax.core.recurrence.gated_delta import GatedDeltaOutput as GatedDeltaOutput
from fwpkm_jax.core.recurrence.gated_delta import chunk_gated_delta_rule as chunk_gated_delta_rule
