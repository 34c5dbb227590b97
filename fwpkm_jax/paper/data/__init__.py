"""The texts that the paper trains and evaluates on, for `fwpkm_jax.data.prepare`."""
