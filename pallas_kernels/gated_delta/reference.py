"""The operation's definition in plain JAX, from `fwpkm_jax.core.recurrence.gated_delta`."""

from fwpkm_jax.core.recurrence.gated_delta import GatedDeltaOutput as GatedDeltaOutput
from fwpkm_jax.core.recurrence.gated_delta import chunk_gated_delta_rule as chunk_gated_delta_rule
