"""The RMS norm of a gated mix, by kernels with their own backward pass or in plain JAX."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.checks import LANES, assert_results_agree
from pallas_kernels.dispatch import Backend, Kernel, implementation
from pallas_kernels.mix_rms_norm import reference
from pallas_kernels.mix_rms_norm.specs import CHECK_RATIOS, CHECKED, SPECS, MixSpec, sample

OP = "mix_rms_norm"
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
      backend: "auto", "reference" or "pallas".

    Returns:
      `normed`, in `dtype`.

    Raises:
      ValueError: `backend="pallas"` on a platform without a kernel.
      NotImplementedError: `backend="pallas"` with a width or dtype that the kernel does not take.
    """
    chosen = implementation(
        OP,
        backend,
        kernels=("gpu",),
        supports=functools.partial(_refusal, x, y, gate, dtype),
        check=check_mixes,
    )
    if chosen == "reference":
        return reference.mix_rms_norm(x, y, gate, eps=eps, dtype=dtype)
    batch, length, width = x.shape
    if chunk_size is None or length % chunk_size or batch % sequences:
        sequences, chunk_size = 1, length
    laid = x.reshape(
        batch // sequences, sequences, length // chunk_size, chunk_size, width
    ).swapaxes(1, 2)
    return _run(float(eps), jnp.dtype(dtype), laid, y, gate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(eps, dtype, *arrays) -> jax.Array:
    return _forward(eps, dtype, *arrays)[0]


def _run_forward(eps, dtype, *arrays):
    normed, inverses = _forward(eps, dtype, *arrays)
    return normed, (*arrays, inverses)


def _run_backward(eps, dtype, saved, normed_bar):
    del eps, dtype
    return _backward(*saved, normed_bar)


_run.defvjp(_run_forward, _run_backward)


# `jit` traces these once for equal arguments, so a model lowers its kernels once, not per layer.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(eps, dtype, *arrays) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.mix_rms_norm import gpu

    return gpu.forward(*arrays, eps=eps, dtype=dtype)


@jax.jit
def _backward(*arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    from pallas_kernels.mix_rms_norm import gpu

    return gpu.backward(*arrays)


def _refusal(
    x: jax.Array, y: jax.Array, gate: jax.Array, dtype: DTypeLike, kernel: Kernel
) -> str | None:
    """None, or why the kernels do not accept these arrays."""
    del kernel
    if x.dtype != jnp.float32:
        return f"rows in {x.dtype}, only float32"
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        return f"rows {y.dtype}{[*y.shape]} beside rows {x.dtype}{[*x.shape]}"
    if (gate.shape, gate.dtype) != (x.shape[:2], x.dtype):
        return f"a gate {gate.dtype}{[*gate.shape]} of rows {x.dtype}{[*x.shape]}"
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"a result in {jnp.dtype(dtype)}, only float32 and bfloat16"
    if x.size == 0:
        return f"rows of shape {x.shape}, at least one"
    if x.shape[-1] % LANES or x.shape[-1] > WIDEST:
        return f"rows of {x.shape[-1]} values, only multiples of {LANES} up to {WIDEST}"
    return None


def check_mixes(kernel: Kernel) -> None:
    """Runs the kernels on this device; raises if they differ from the reference."""
    del kernel  # It is the one of this device.
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        for dtype, ratio in CHECK_RATIOS.items():
            assert_results_agree(op_of(spec, dtype), sample(spec, dtype), ratio=ratio)


def op_of(spec: MixSpec, dtype: DTypeLike) -> Callable[..., jax.Array]:
    """`mix_rms_norm` of such arrays, results in `dtype` with a factor for each column.

    Without factors, results taken for cotangents are cotangents of length alone, which cancel.
    """

    def op(**arrays: Any) -> jax.Array:
        normed = mix_rms_norm(
            **arrays,
            eps=spec.eps,
            dtype=jnp.dtype(dtype),
            sequences=spec.sequences,
            chunk_size=spec.chunk_size,
        )
        return normed * jnp.linspace(1.0, 2.0, spec.width, dtype=normed.dtype)[None, None]

    return op
