"""The public `product_top_k`: chooses an implementation and defines its derivatives."""

import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots.addressing import (
    Address,
    Nonlinearity,
    Normalization,
    Score,
    slot_weights,
)
from pallas_kernels import dispatch
from pallas_kernels.product_top_k import reference, vjp
from pallas_kernels.product_top_k.reference import Selection
from pallas_kernels.product_top_k.specs import CHECKED, SPECS, sample

OP = "product_top_k"


def product_top_k(
    queries: Queries,
    keys: SubKeys,
    *,
    top_k: int,
    score: Score = "idw",
    normalization: Normalization = "token",
    nonlinearity: Nonlinearity = "softmax",
    temperature: float = 1.0,
    backend: dispatch.Backend = "auto",
) -> Selection:
    """Each query's best slots and their read weights, without a score matrix in device memory.

    The kernels score a tile of tokens against one codebook after the other, keep the best sub-keys
    of each, and merge the pairs of ranks i j <= top_k. Scores are accurate to float32, and equal
    scores go to the lower sub-key, then to the lower slot. Cotangents pass through the chosen
    scores, and no matrix of scores is kept for them; the operation may be differentiated twice,
    batched and scanned over.

    Args:
      queries: `[tokens, heads, key]`; the first half of `key` addresses rows.
      keys: `[heads, 2, subkeys, key // 2]`, rows first.
      top_k: slots per head, at most `subkeys`.
      score: `idw` or `dot`, see `core.slots.addressing.sub_key_scores`.
      normalization: see `core.slots.addressing.slot_weights`, as are the next two.
      nonlinearity: from slot scores to weights.
      temperature: divides the slot scores.
      backend: `auto`, `reference` or `pallas`; kernels take float32 alone.

    Returns:
      The address of `core.slots.addressing.product_top_k` and the weights `[tokens, heads, top_k]`.

    Raises:
      ValueError: as `core.slots.addressing.product_top_k`, or there is no kernel for the platform.
      NotImplementedError: `pallas` with inputs that its kernel does not take.

    References: Lample et al. 2019, arXiv:1907.05242; Zhao and Jones 2026, arXiv:2601.00671.
    """
    # The reference refuses invalid shapes with its own message.
    jax.eval_shape(functools.partial(reference.address, top_k=top_k, score=score), queries, keys)
    chosen = dispatch.implementation(
        OP,
        backend,
        supports=lambda kernel: unsupported(kernel, queries, keys, top_k=top_k),
        check=_check,
    )
    address = cast(Address, _address(chosen, top_k, score, queries, keys))
    weights = slot_weights(
        address.slot_scores,
        normalization=normalization,
        nonlinearity=nonlinearity,
        temperature=temperature,
    )
    return Selection(address, weights)


def unsupported(
    kernel: dispatch.Kernel, queries: jax.Array, keys: jax.Array, *, top_k: int
) -> str | None:
    """None, or why the kernel does not accept these arrays."""
    dtypes = {queries.dtype, keys.dtype}
    if dtypes != {jnp.dtype(jnp.float32)}:
        return f"dtypes {queries.dtype} and {keys.dtype}; both must be float32"
    subkeys, half = keys.shape[2:]
    if queries.shape[0] == 0:
        return "0 tokens"
    if subkeys > 1024 or top_k > 32 or half > 512:
        return f"subkeys={subkeys}, top_k={top_k}, half={half}; at most 1024, 32 and 512"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _address(
    chosen: dispatch.Implementation, top_k: int, score: Score, queries: Queries, keys: SubKeys
) -> Address:
    if chosen == "reference":
        return reference.address(queries, keys, top_k=top_k, score=score)
    if chosen == "tpu":
        from pallas_kernels.product_top_k import tpu as implementation
    else:
        from pallas_kernels.product_top_k import gpu as implementation
    return implementation.address(queries, keys, top_k=top_k, score=score)


def _forward(chosen, top_k, score, queries, keys):
    # This calls the differentiable function, not the kernel, so that second derivatives exist.
    address = _address(chosen, top_k, score, queries, keys)
    return address, (queries, keys, address)


def _backward(chosen, top_k, score, residuals, cotangent: Address):
    del top_k
    queries, keys, address = residuals
    scores = cotangent.slot_scores, cotangent.sub_key_scores
    return vjp.cotangents(queries, keys, address, *scores, score=score)


_address.defvjp(_forward, _backward)


def _check(kernel: dispatch.Kernel) -> None:
    """Compares the kernel with the reference on a small call on this device."""
    spec = next(spec for spec in SPECS if spec.name == CHECKED)
    arrays = sample(spec, jnp.float32)
    actual = cast(Address, _address(kernel, spec.top_k, spec.score, **arrays))
    expected = reference.address(**arrays, top_k=spec.top_k, score=spec.score)
    np.testing.assert_array_equal(actual.slot_ids, expected.slot_ids)
    np.testing.assert_array_equal(actual.sub_key_ids, expected.sub_key_ids)
    np.testing.assert_allclose(actual.slot_scores, expected.slot_scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual.sub_key_scores, expected.sub_key_scores, rtol=1e-5, atol=1e-5)
