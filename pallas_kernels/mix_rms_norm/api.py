"""The RMS norm of a gated mix, by kernels with their own backward pass or in plain JAX."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.numerics import rms_normalize
from pallas_kernels.dispatch import Backend, Kernel, Operation, module_of, run_kernels
from pallas_kernels.refusals import FLOATS, ragged, refusal

WIDEST = 1024
"""Widest rows of the kernels, whose threads hold two rows and their cotangents in registers."""


def mix_rms_norm(
    x: Float[Array, "batch length width"],
    y: Float[Array, "batch length width"],
    gate: Float[Array, "batch length"],
    *,
    eps: float,
    dtype: DTypeLike,
    sequences: int = 1,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> Float[Array, "batch length width"]:
    """The root-mean-square norm of a mix of two arrays, without a scale.

        mixed = gate * x + (1 - gate) * y
        normed = mixed / sqrt(mean(mixed^2) + eps)

    A kernel reads both arrays once and does not store the mix, in either direction.

    Args:
      x: in float32 for the kernels, width a multiple of 128 up to 1,024.
      y: in the dtype of `x`.
      gate: in the dtype of `x`.
      eps: added to the mean square.
      dtype: of the result; for the kernels float32 or bfloat16.
      sequences: neighbours in the batch whose chunks of `chunk_size` tokens stand one after the
        other where `x` comes from, as those of a memory that they share. It changes no result: the
        kernels read and write `x` and its cotangent in that order, so that XLA need not turn them.
      chunk_size: of these chunks; it must divide the length, or the order is that of the batch.
      backend: as of `dispatch.Operation.choose`, errors included.
    """
    chosen = MIX_RMS_NORM.choose(backend, x, y, gate, jnp.dtype(dtype))
    if chosen == "reference":
        gate = gate[..., None]
        return rms_normalize(gate * x + (1.0 - gate) * y, eps=eps).astype(dtype)
    batch, length, width = x.shape
    # Without whole chunks the rows come in the order of the batch.
    if chunk_size is None or length % chunk_size or batch % sequences:
        sequences, chunk_size = 1, length
    # A view of the order that the rows lie in, so that no copy turns them.
    laid = x.reshape(
        batch // sequences, sequences, length // chunk_size, chunk_size, width
    ).swapaxes(1, 2)
    kernels = module_of("mix_rms_norm", chosen)
    return run_kernels(kernels, laid, y, gate, eps=float(eps), dtype=jnp.dtype(dtype))


def _refuses(
    _: Kernel, x: jax.Array, y: jax.Array, gate: jax.Array, dtype: jnp.dtype
) -> str | None:
    rows, width = f"rows {x.dtype}{[*x.shape]}", x.shape[-1]
    alike = (y.shape, y.dtype) == (x.shape, x.dtype)
    gates = (gate.shape, gate.dtype) == (x.shape[:2], x.dtype)
    return refusal(
        (x.dtype != jnp.float32, f"rows in {x.dtype}, only float32"),
        (not alike, f"rows {y.dtype}{[*y.shape]} beside {rows}"),
        (not gates, f"a gate {gate.dtype}{[*gate.shape]} of {rows}"),
        (dtype not in FLOATS, f"a result in {dtype}, only float32 and bfloat16"),
        (x.size == 0, f"rows of shape {x.shape}, at least one"),
        ragged(width, WIDEST, of="values"),
    )


MIX_RMS_NORM = Operation("mix_rms_norm", _refuses, kernels=("gpu",))
