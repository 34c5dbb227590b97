"""The kernels of fwpkm_jax, which install under a name of their own: its layout names them so.

One folder per operation. `api.py` has the public function, whose body is the definition in plain
JAX beside the call of the kernels, and its `Operation`; `tpu.py` and `gpu.py` (Mosaic GPU, Hopper)
are the kernels; `specs.py` has the named shapes that tests, ahead-of-time compiles and benchmarks
share, and the check before first use. `dispatch.py` chooses between kernels and plain JAX, and runs
kernels that have a backward pass of their own. `row_ops.py` joins the kernels that a scan over
chunks of FwPKM calls.
"""
