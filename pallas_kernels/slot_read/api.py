"""Weighted sums of rows and inner products with rows, computed by kernels or in plain JAX."""

import functools

import chex
import jax.numpy as jnp

from fwpkm_jax.core.array_types import (
    SlotIds,
    SlotWeights,
    TokenValues,
    TokenWeights,
    ValueTable,
)
from pallas_kernels.checks import assert_results_agree, refuse_rows
from pallas_kernels.dispatch import Backend, Kernel, implementation
from pallas_kernels.row_gradients import dot, read
from pallas_kernels.slot_read import reference
from pallas_kernels.slot_read.reference import SlotRead
from pallas_kernels.slot_read.specs import CHECK_RATIO, CHECKED, SPECS, sample, sample_dot


def slot_read(
    values: ValueTable,
    slot_ids: SlotIds,
    weights: SlotWeights,
    *,
    target: TokenValues | None = None,
    write_weight: TokenWeights | None = None,
    backend: Backend = "auto",
) -> SlotRead:
    """Weighted sums of slot values, one per token, and their errors if targets are given.

        output[t] = sum_p weights[t, p] * values[slot_ids[t, p]]
        errors[t] = write_weight[t] * (output[t] - target[t])

    A kernel keeps a token's sum in registers while its rows arrive, so it does not make an array
    `[tokens, places, value]`. It sums places in order, in float32. An array of the table's size is
    made for the gradient only if the caller differentiates with respect to the table.

    Args:
      values: `[slots, value]` float32, on a GPU also bfloat16; value a multiple of 128.
      slot_ids: `[tokens, places]` int32, each below `slots`.
      weights: `[tokens, places]` float32.
      target: `[tokens, value]` float32, or None.
      write_weight: `[tokens]` float32; given with `target` only.
      backend: "auto", "reference" or "pallas".

    Returns:
      `output` `[tokens, value]` and `errors` `[tokens, value]`; `errors` is None without targets.

    Raises:
      ValueError: only one of `target` and `write_weight` is given, or the platform has no kernel.
      NotImplementedError: `backend="pallas"` with a width or dtype that the kernel does not take.
    """
    if (target is None) != (write_weight is None):
        raise ValueError("target and write_weight go together: pass both or neither.")
    chex.assert_equal_shape([slot_ids, weights])
    chosen = implementation(
        "slot_read",
        backend,
        supports=functools.partial(refuse_rows, values, (weights, target, write_weight)),
        check=check_read,
    )
    if chosen == "reference":
        return reference.slot_read(values, slot_ids, weights, target, write_weight)
    return SlotRead(*read(chosen, values, slot_ids, weights, target, write_weight))


def slot_dot(
    values: ValueTable, slot_ids: SlotIds, vectors: TokenValues, *, backend: Backend = "auto"
) -> SlotWeights:
    """Inner products `[tokens, places]` of each token's vector with the rows that it reads.

        dot[t, p] = <values[slot_ids[t, p]], vectors[t]>

    If `vectors` is the cotangent of `slot_read`'s output, this is the cotangent of its weights.

    Args:
      values: `[slots, value]` float32, on a GPU also bfloat16; value a multiple of 128.
      slot_ids: `[tokens, places]` int32, each below `slots`.
      vectors: `[tokens, value]` float32.
      backend: "auto", "reference" or "pallas".

    Raises:
      ValueError: `backend="pallas"` on a platform without a kernel.
      NotImplementedError: `backend="pallas"` with a width or dtype that the kernel does not take.
    """
    chex.assert_equal_shape_prefix([slot_ids, vectors], 1)
    chosen = implementation(
        "slot_dot",
        backend,
        supports=functools.partial(refuse_rows, values, (vectors,)),
        check=check_dot,
    )
    if chosen == "reference":
        return reference.slot_dot(values, slot_ids, vectors)
    return dot(chosen, values, slot_ids, vectors)


def check_read(kernel: Kernel) -> None:
    del kernel  # It is the one of this device.
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        assert_results_agree(slot_read, sample(spec, jnp.float32), ratio=CHECK_RATIO)


def check_dot(kernel: Kernel) -> None:
    del kernel  # It is the one of this device.
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        assert_results_agree(slot_dot, sample_dot(spec, jnp.float32), ratio=CHECK_RATIO)
