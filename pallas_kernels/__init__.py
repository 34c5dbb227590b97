"""Pallas kernels for the most expensive operations, each with its definition in plain JAX.

One folder per operation: `reference.py` defines it, `tpu.py` and `gpu.py` (Mosaic GPU, Hopper) are
its kernels, `api.py` has the public function with its gradient, and `specs.py` the named shapes
that tests, ahead-of-time compiles and benchmarks share. `dispatch.py` chooses between kernels and
reference.
"""
