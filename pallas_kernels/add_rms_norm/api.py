"""A residual sum with its RMS norm, by kernels with their own backward pass or in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.numerics import rms_normalize
from pallas_kernels.dispatch import Backend, Kernel, Operation, module_of, run_kernels
from pallas_kernels.refusals import FLOATS, ragged, refusal

WIDEST = 2048
"""Widest rows of the kernels, whose threads hold a row and its cotangents in registers."""


class AddRMSNorm(NamedTuple):
    """A residual stream and its norm, both in the stream's dtype."""

    total: jax.Array
    normed: jax.Array


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
      backend: as of `dispatch.Operation.choose`, errors included.
    """
    chosen = ADD_RMS_NORM.choose(backend, x, branch, scale)
    if chosen == "reference":
        total = x if branch is None else x + branch
        scale = jnp.expand_dims(scale, range(x.ndim - 1))
        return AddRMSNorm(total, (rms_normalize(total, eps=eps) * scale).astype(x.dtype))
    # Kernels see rows; leading axes make no difference to a norm.
    terms = (y if y is None else y.reshape(-1, y.shape[-1]) for y in (x, branch))
    results = run_kernels(module_of("add_rms_norm", chosen), *terms, scale, eps=float(eps))
    return AddRMSNorm(*(y.reshape(x.shape) for y in results))


def _refuses(_: Kernel, x: jax.Array, branch: jax.Array | None, scale: jax.Array) -> str | None:
    one = x if branch is None else branch
    alike = (one.shape, one.dtype) == (x.shape, x.dtype)
    width = x.shape[-1]
    return refusal(
        (x.dtype not in FLOATS, f"a stream in {x.dtype}, only float32 and bfloat16"),
        (not alike, f"a branch {one.dtype}{[*one.shape]} beside a stream {x.dtype}{[*x.shape]}"),
        (scale.dtype != jnp.float32, f"a scale in {scale.dtype}, only float32"),
        (x.size == 0, f"a stream of shape {x.shape}, at least one row"),
        ragged(width, WIDEST, of="values"),
    )


ADD_RMS_NORM = Operation("add_rms_norm", _refuses, kernels=("gpu",))
