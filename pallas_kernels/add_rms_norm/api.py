"""A residual sum with its RMS norm, by kernels with their own backward pass or in plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm import reference
from pallas_kernels.add_rms_norm.reference import AddRMSNorm
from pallas_kernels.add_rms_norm.specs import CHECK_RATIOS, CHECKED, SPECS, sample
from pallas_kernels.checks import LANES, assert_results_agree
from pallas_kernels.dispatch import Backend, Kernel, implementation

OP = "add_rms_norm"
WIDEST = 2048
"""Widest rows of the kernels, whose threads hold a row and its cotangents in registers."""


def add_rms_norm(
    x: Float[Array, "*dims width"],
    branch: Float[Array, "*dims width"] | None,
    scale: Float[Array, " width"],
    *,
    eps: float,
    backend: Backend = "auto",
) -> AddRMSNorm:
    """The residual stream after a branch is added to it, and its root-mean-square norm.

        total = x + branch
        normed = total / sqrt(mean(total^2) + eps) * scale

    The norm is computed in at least float32 and cast to the stream's dtype. A kernel reads both
    terms once; in the backward pass it reads the sum and both cotangents once, and adds the
    stream's own cotangent to the norm's. The scale's gradient is summed in a fixed order.

    Args:
      x: the stream, `[..., width]`; for the kernels float32 or bfloat16, width a multiple of 128 up
        to 2,048.
      branch: what is added, in the shape and dtype of `x`; None: nothing.
      scale: `[width]`, for the kernels float32.
      eps: added to the mean square.
      backend: "auto", "reference" or "pallas".

    Returns:
      `total` and `normed`, in the shape and dtype of `x`.

    Raises:
      ValueError: `backend="pallas"` on a platform without a kernel.
      NotImplementedError: `backend="pallas"` with a width or dtype that the kernel does not take.
    """
    chosen = implementation(
        OP,
        backend,
        kernels=("gpu",),
        supports=functools.partial(_refusal, x, branch, scale),
        check=check_norms,
    )
    if chosen == "reference":
        return reference.add_rms_norm(x, branch, scale, eps=eps)
    rows = (-1, x.shape[-1])
    added = None if branch is None else branch.reshape(rows)
    results: Any = _run(float(eps), branch is None, x.reshape(rows), added, scale)
    total, normed = results
    return AddRMSNorm(total.reshape(x.shape), normed.reshape(x.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(eps, alone, x, branch, scale) -> tuple[jax.Array, jax.Array]:
    del alone
    return _forward(eps, x, branch, scale)[:2]


def _run_forward(eps, alone, x, branch, scale):
    del alone
    total, normed, inverses = _forward(eps, x, branch, scale)
    return (total, normed), (total, scale, inverses)


def _run_backward(eps, alone, saved, cotangents):
    del eps
    x_bar, scale_bar = _backward(*saved, *cotangents)
    return x_bar, None if alone else x_bar, scale_bar


_run.defvjp(_run_forward, _run_backward)


# `jit` traces these once for equal arguments, so a model lowers its kernels once, not per layer.
@functools.partial(jax.jit, static_argnums=0)
def _forward(eps: float, x: jax.Array, branch: jax.Array | None, scale: jax.Array) -> tuple:
    from pallas_kernels.add_rms_norm import gpu

    return gpu.forward(x, branch, scale, eps=eps)


@jax.jit
def _backward(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.add_rms_norm import gpu

    return gpu.backward(*arrays)


def _refusal(
    x: jax.Array, branch: jax.Array | None, scale: jax.Array, kernel: Kernel
) -> str | None:
    """None, or why the kernels do not accept these arrays."""
    del kernel
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"a stream in {x.dtype}, only float32 and bfloat16"
    if branch is not None and (branch.shape, branch.dtype) != (x.shape, x.dtype):
        return f"a branch {branch.dtype}{[*branch.shape]} beside a stream {x.dtype}{[*x.shape]}"
    if scale.dtype != jnp.float32:
        return f"a scale in {scale.dtype}, only float32"
    if x.size == 0:
        return f"a stream of shape {x.shape}, at least one row"
    if x.shape[-1] % LANES or x.shape[-1] > WIDEST:
        return f"rows of {x.shape[-1]} values, only multiples of {LANES} up to {WIDEST}"
    return None


def check_norms(kernel: Kernel) -> None:
    """Runs the kernels on this device; raises if they differ from the reference."""
    del kernel  # It is the one of this device.
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        op = functools.partial(add_rms_norm, eps=spec.eps)
        for dtype, ratio in CHECK_RATIOS.items():
            assert_results_agree(op, sample(spec, jnp.dtype(dtype)), ratio=ratio)
