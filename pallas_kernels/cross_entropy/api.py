"""Cross-entropies and gradients of rows of logits, by a kernel or in plain JAX."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core import cross_entropy as reference
from pallas_kernels.dispatch import Backend, Kernel, Operation, module_of
from pallas_kernels.refusals import FLOATS, ragged, refusal

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
      labels: `[tokens]` int32, from 0 and below `vocab`; others are not checked, and their losses
        are undefined.
      weights: `[tokens]`, in the dtype of the logits.
      dtype: of the gradient; for the kernel float32 or bfloat16.
      backend: as of `dispatch.Operation.choose`, errors included.
    """
    chosen = CROSS_ENTROPY.choose(backend, logits, labels, weights, jnp.dtype(dtype))
    if chosen == "reference":
        return reference.row_cross_entropy(logits, labels, weights, dtype=dtype)
    kernels = module_of("cross_entropy", chosen)
    return kernels.row_cross_entropy(logits, labels, weights, dtype=dtype)


def _refuses(
    _: Kernel, logits: jax.Array, labels: jax.Array, weights: jax.Array, dtype: jnp.dtype
) -> str | None:
    inputs = {str(logits.dtype), str(weights.dtype)}
    given = f"{logits.dtype} logits with {weights.dtype} weights"
    return refusal(
        (inputs != {"float32"}, f"{given}, only float32"),
        (labels.dtype != jnp.int32, f"{labels.dtype} labels, only int32"),
        (dtype not in FLOATS, f"a gradient in {dtype}, only float32 and bfloat16"),
        (logits.shape[0] == 0, f"logits of shape {logits.shape}, at least one row"),
        ragged(logits.shape[1], WIDEST, of="logits"),
    )


CROSS_ENTROPY = Operation("cross_entropy", _refuses, kernels=("gpu",))
