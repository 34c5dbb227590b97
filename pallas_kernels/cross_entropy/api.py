"""Cross-entropies and gradients of rows of logits, by a kernel or in plain JAX."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core import cross_entropy as reference
from pallas_kernels.checks import LANES, relative_errors
from pallas_kernels.cross_entropy.specs import CHECK_RATIOS, CHECKED, SPECS, sample
from pallas_kernels.dispatch import Backend, Kernel, implementation

OP = "cross_entropy"
WIDEST = 56_320
"""Most logits of a row that fit the shared memory of a GPU's processor."""


def row_cross_entropy(
    logits: Float[Array, "tokens vocab"],
    labels: Int[Array, " tokens"],
    weights: Float[Array, " tokens"],
    *,
    dtype: DTypeLike,
    backend: Backend = "auto",
) -> tuple[Float[Array, " tokens"], Float[Array, "tokens vocab"]]:
    """Cross-entropies of rows of logits, in nats, and the gradient of their weighted sum.

    Equal to `core.cross_entropy.row_cross_entropy`. The kernel reads each logit once from device
    memory and writes the gradient in the dtype that the products after it read. It has no VJP:
    `core.cross_entropy.linear_cross_entropy`, which calls it, has.

    Args:
      logits: `[tokens, vocab]`; for the kernel float32, vocab a multiple of 128 up to 56,320.
      labels: `[tokens]` int32, each below `vocab`.
      weights: `[tokens]`, in the dtype of the logits.
      dtype: of the gradient; for the kernel float32 or bfloat16.
      backend: "auto", "reference" or "pallas".

    Returns:
      Losses `[tokens]` and gradient `[tokens, vocab]`.

    Raises:
      ValueError: `backend="pallas"` on a platform without a kernel.
      NotImplementedError: `backend="pallas"` with a vocabulary or dtypes that the kernel does not
        take.
    """
    chosen = implementation(
        OP,
        backend,
        kernels=("gpu",),
        supports=functools.partial(_refusal, logits, labels, weights, jnp.dtype(dtype)),
        check=check_rows,
    )
    if chosen == "reference":
        return reference.row_cross_entropy(logits, labels, weights, dtype=dtype)
    from pallas_kernels.cross_entropy import gpu

    return gpu.row_cross_entropy(logits, labels, weights, dtype=dtype)


def _refusal(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, dtype: jnp.dtype, kernel: Kernel
) -> str | None:
    """None, or why the kernel does not accept these arrays."""
    del kernel
    if {logits.dtype, weights.dtype} != {jnp.dtype(jnp.float32)}:
        return f"{logits.dtype} logits with {weights.dtype} weights, only float32"
    if labels.dtype != jnp.int32:
        return f"{labels.dtype} labels, only int32"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"a gradient in {dtype}, only float32 and bfloat16"
    tokens, vocab = logits.shape
    if tokens == 0:
        return f"logits of shape {logits.shape}, at least one row"
    if vocab % LANES or not 0 < vocab <= WIDEST:
        return f"rows of {vocab} logits, only multiples of {LANES} up to {WIDEST}"
    return None


def check_rows(kernel: Kernel) -> None:
    """Runs the kernel on this device; raises if it differs from the reference."""
    del kernel  # It is the one of this device.
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        arrays = sample(spec)
        for dtype, ratio in CHECK_RATIOS.items():
            results = (
                jax.jit(functools.partial(row_cross_entropy, dtype=dtype, backend=x))(**arrays)
                for x in ("pallas", "reference")
            )
            for name, error in relative_errors(*results).items():
                if not error <= ratio:
                    raise AssertionError(
                        f"result {name} differs by {error:.2g} of its norm in {dtype} ({spec.name})"
                    )
