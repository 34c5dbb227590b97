"""Pallas kernels for the most expensive operations, each with its definition in plain JAX.

One folder per operation: `reference.py` defines it (where it isn't a function of `fwpkm_jax.core`),
`tpu.py` and `gpu.py` (Mosaic GPU, Hopper) are its kernels, where it has them, `api.py` has the
public function with its gradient, and `specs.py` the named shapes that tests, ahead-of-time
compiles and benchmarks share. `dispatch.py` chooses between kernels and reference. `row_ops.py`
joins the kernels that a scan over chunks of FwPKM calls.
"""
