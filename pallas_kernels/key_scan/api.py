"""What goes over the chunks of a memory's keys: kernels that fit the arrays, or plain XLA."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import SubKeys
from fwpkm_jax.core.slots.keys.scan import KeyLoops
from fwpkm_jax.core.slots.write import KeyWrite
from pallas_kernels import dispatch
from pallas_kernels.checks import LANES
from pallas_kernels.key_scan.specs import CHECK_RATIO, CHECKED, DTYPES, SPECS, errors_of
from pallas_kernels.product_top_k import api as product_top_k

OP = "key_scan"
_TILES = {"tokens": 64, "subkeys": 128}


def key_loops(
    keys: SubKeys,
    queries: Float[Array, "chunks tokens heads key"],
    *,
    top_k: int,
    key_write: KeyWrite,
    backend: dispatch.Backend = "auto",
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
    chosen = dispatch.implementation(
        OP,
        "auto" if backend == "pallas" else backend,
        kernels=("gpu",),
        supports=functools.partial(_refuse, keys, queries, top_k, key_write),
        check=check_keys,
        uses=(product_top_k.OP,),
    )
    return KeyLoops() if chosen == "reference" else loops_of(chosen, top_k)


def loops_of(chosen: dispatch.Implementation, top_k: int) -> KeyLoops:
    """The loops of one implementation."""
    if chosen == "reference":
        return KeyLoops()
    from pallas_kernels.key_scan import gpu

    return KeyLoops(functools.partial(gpu.forward, top_k), gpu.backward, gpu.to_queries)


def _refuse(
    keys: SubKeys, queries: jax.Array, top_k: int, key_write: KeyWrite, kernel: dispatch.Kernel
) -> str | None:
    """None, or why the kernels do not take these arrays."""
    # Queries in bfloat16 are taken as they are.
    dtype = jnp.float32 if queries.dtype == jnp.bfloat16 else queries.dtype
    chunk = jax.ShapeDtypeStruct(queries.shape[1:], dtype)
    refused = product_top_k.unsupported(kernel, chunk, keys, top_k=top_k)
    if refused is not None:
        return refused
    if key_write.score != "idw" or key_write.loss_weight == 0:
        return f"score={key_write.score} with loss_weight={key_write.loss_weight}"
    (_, tokens, _, _), (_, _, subkeys, half) = queries.shape, keys.shape
    for name, size in {"tokens": tokens, "subkeys": subkeys}.items():
        if size == 0 or size % _TILES[name]:
            return f"{name}={size}, only multiples of {_TILES[name]}"
    if half % LANES:
        widest = product_top_k.WIDEST_HALF[kernel]
        return f"half={half}, only multiples of {LANES} up to {widest}"
    if top_k > 16:
        return f"subkeys={subkeys}, top_k={top_k}; at most 1024 and 16"
    return None


def check_keys(kernel: dispatch.Kernel) -> None:
    """Runs the kernels on this device; raises if they differ from plain XLA."""
    product_top_k.check_selection(kernel)
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        loops = loops_of(kernel, spec.top_k), loops_of("reference", spec.top_k)
        for dtype in DTYPES:
            for name, error in errors_of(spec, *loops, dtype=dtype).items():
                if not error <= CHECK_RATIO:
                    raise AssertionError(
                        f"{name} differs by {error:.2g} of its norm ({spec.name}, {dtype})"
                    )
