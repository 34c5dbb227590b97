"""The memory's hot operations as Pallas kernels, each beside the plain JAX that defines it.

One folder per operation: `reference.py` is its meaning, `tpu.py`, `tpu_sparse_core.py` and `gpu.py`
(Mosaic GPU, Hopper) its kernels, `api.py` the public function that chooses among them and
differentiates, `specs.py` the named shapes that tests, ahead-of-time compiles and benchmarks share.
`dispatch.py` chooses.
"""
