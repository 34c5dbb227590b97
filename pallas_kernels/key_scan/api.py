"""What goes over the chunks of a memory's keys: kernels that fit the arrays, or plain XLA."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import SubKeys
from fwpkm_jax.core.slots.keys.scan import KeyLoops
from fwpkm_jax.core.slots.write import KeyWrite
from pallas_kernels.dispatch import (
    Backend,
    Kernel,
    Operation,
    module_of,
)
from pallas_kernels.product_top_k import api as product_top_k
from pallas_kernels.refusals import LANES, refusal


def key_loops(
    keys: SubKeys,
    queries: Float[Array, "chunks tokens heads key"],
    *,
    top_k: int,
    key_write: KeyWrite,
    backend: Backend = "auto",
) -> KeyLoops:
    """The loops for such keys and queries.

    A loop of kernels reads each chunk where it lies and writes the sub-keys in place; it selects by
    the kernel of `product_top_k`. Inputs that they do not take get the loops of
    `core.slots.keys.scan`, also with `pallas`: their selection may still be a kernel.

    Args:
      keys: of one memory, `[heads, 2, subkeys, key // 2]`.
      queries: of every chunk, in the dtype of the keys or in bfloat16.
      top_k: chosen sub-keys of each codebook.
      key_write: how the keys move.
      backend: "auto", "reference" or "pallas".
    """
    by_request = "auto" if backend == "pallas" else backend
    chosen = KEY_SCAN.choose(by_request, keys, queries, top_k, key_write)
    return KeyLoops() if chosen == "reference" else loops_of(chosen, top_k)


def loops_of(kernel: Kernel, top_k: int) -> KeyLoops:
    """The loops of a device's kernels."""
    gpu = module_of("key_scan", kernel)
    return KeyLoops(functools.partial(gpu.forward, top_k), gpu.backward, gpu.to_queries)


def _refuses(
    kernel: Kernel, keys: SubKeys, queries: jax.Array, top_k: int, key_write: KeyWrite
) -> str | None:
    # Queries in bfloat16 are taken as they are.
    dtype = jnp.float32 if queries.dtype == jnp.bfloat16 else queries.dtype
    chunk = jax.ShapeDtypeStruct(queries.shape[1:], dtype)
    (_, tokens, _, _), (_, _, subkeys, half) = queries.shape, keys.shape
    score, loss_weight = key_write.score, key_write.loss_weight
    no_gradient = score != "idw" or loss_weight == 0
    return product_top_k.refuses(kernel, chunk, keys, top_k=top_k) or refusal(
        (no_gradient, f"score={score} with loss_weight={loss_weight}"),
        *(
            (size == 0 or size % tile > 0, f"{name}={size}, only multiples of {tile}")
            for name, size, tile in (("tokens", tokens, 64), ("subkeys", subkeys, 128))
        ),
        (
            half % LANES > 0,
            f"half={half}, only multiples of {LANES} up to {product_top_k.WIDEST_HALF[kernel]}",
        ),
        (top_k > 16, f"subkeys={subkeys}, top_k={top_k}; at most 1024 and 16"),
    )


KEY_SCAN = Operation("key_scan", _refuses, kernels=("gpu",), uses=("product_top_k",))
