"""What goes over the chunks of a memory's keys in place of plain XLA."""

import functools

import jax
import jax.numpy as jnp

from fwpkm_jax.core.slots.keys.scan import KeyLoops
from fwpkm_jax.core.slots.write import KeyWrite
from pallas_kernels.dispatch import Kernel, Operation, module_of
from pallas_kernels.product_top_k import api as product_top_k
from pallas_kernels.refusals import LANES, refusal


def key_loops(kernel: Kernel, top_k: int) -> KeyLoops:
    """The loops of a device's kernels, for so many chosen sub-keys of each codebook.

    They read each chunk where it lies and write the sub-keys in place; they select by the kernel
    of `product_top_k`. `KEY_SCAN.choose(backend, keys, queries, top_k, key_write)` says whether
    they take the arrays of one memory: keys `[heads, 2, subkeys, key // 2]` and the queries of
    every chunk `[chunks, tokens, heads, key]`, in the dtype of the keys or in bfloat16.
    """
    gpu = module_of("key_scan", kernel)
    return KeyLoops(functools.partial(gpu.forward, top_k), gpu.backward, gpu.to_queries)


def _refuses(
    kernel: Kernel,
    keys: jax.Array | jax.ShapeDtypeStruct,
    queries: jax.Array | jax.ShapeDtypeStruct,
    top_k: int,
    key_write: KeyWrite,
) -> str | None:
    # Queries in bfloat16 are taken as they are.
    dtype = jnp.float32 if queries.dtype == jnp.bfloat16 else queries.dtype
    chunk = jax.ShapeDtypeStruct(queries.shape[1:], dtype)
    (_, tokens, _, _), (_, _, subkeys, half) = queries.shape, keys.shape
    score, loss_weight = key_write.score, key_write.loss_weight
    # Other keys do not move by the kernels' formula, or not at all.
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


KEY_SCAN = Operation(
    "key_scan",
    _refuses,
    kernels=("gpu",),
    check="pallas_kernels.key_scan.specs:check",
    uses=("product_top_k",),
)
