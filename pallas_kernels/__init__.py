"""Pallas kernels for the most expensive operations, each beside its definition in plain JAX.

One folder per operation: `reference.py` defines it, `tpu.py`, `tpu_sparse_core.py` and `gpu.py`
(Mosaic GPU, Hopper) its kernels, `api.py` the public function that chooses among them and
differentiates, `specs.py` the named shapes that tests, ahead-of-time compiles and benchmarks share.
`dispatch.py` chooses.
"""
