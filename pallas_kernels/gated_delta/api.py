"""The gated delta rule in chunks, computed by kernels with their own backward pass."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.recurrence.gated_delta import GatedDeltaOutput
from fwpkm_jax.core.recurrence.gated_delta import chunk_gated_delta_rule as reference
from fwpkm_jax.core.recurrence.linear_recurrence import forgetting
from pallas_kernels.dispatch import (
    LIBRARIES,
    AnyBackend,
    Implementation,
    Operation,
    module_of,
    run_kernels,
)
from pallas_kernels.gated_delta.arguments import (
    CHUNK,
    WIDEST_KEY,
    WIDEST_VALUE,
    WIDTH_STEP,
    Inputs,
)
from pallas_kernels.recurrence import libraries
from pallas_kernels.refusals import refusal


def chunk_gated_delta_rule(
    query: Float[Array, "batch length heads key"],
    key: Float[Array, "batch length heads key"],
    value: Float[Array, "batch length heads value"],
    *,
    log_decay: Float[Array, "batch length heads"],
    beta: Float[Array, "batch length heads"],
    initial_state: Float[Array, "batch heads key value"] | None = None,
    starts: Bool[Array, "batch length"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    backend: AnyBackend = "auto",
) -> GatedDeltaOutput:
    """The gated delta rule over whole sequences, with the device's kernels if it has them.

    Arguments, results and gradients are those of
    `core.recurrence.gated_delta.chunk_gated_delta_rule`, for any length and any initial state.
    Kernels read bfloat16 or float32. They compute in float32; where queries, keys and values are
    bfloat16, they round the operands of products to it.

    Args:
      query: `[batch, length, heads, key]`, key at most 128 for a kernel.
      value: `[batch, length, heads, value]`, value at most 256 for a kernel.
      log_decay: `[batch, length, heads]`, `<= 0`.
      starts: `[batch, length]`, True at tokens before which the memory is emptied, or None.
      scale: factor on the queries; None: `key ** -0.5`.
      chunk_size: tokens per chunk of the reference; kernels always use 64. It changes results only
        by rounding.
      backend: as of `dispatch.Operation.choose`, errors included; or the kernels of another
        package, "jla" or "deltanet_tpu", see `pallas_kernels.recurrence.linear_recurrence`.

    Raises:
      ValueError: `chunk_size` is not positive.
      ModuleNotFoundError: a package named as `backend` is not installed.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} is not positive; use 64, or any number >= 1.")
    chosen = GATED_DELTA.choose(backend, query, key, value, log_decay, beta, initial_state)
    if starts is not None and chosen not in LIBRARIES:
        # Makes the decay exactly 0, for kernels and reference.
        log_decay = forgetting(log_decay, starts, dtype=log_decay.dtype)
    if chosen == "reference":
        how = {"log_decay": log_decay, "beta": beta, "initial_state": initial_state}
        return reference(query, key, value, **how, scale=scale, chunk_size=chunk_size)
    factor = key.shape[-1] ** -0.5 if scale is None else float(scale)
    arrays = query, key, value, log_decay, beta, initial_state
    if chosen in LIBRARIES:
        return GatedDeltaOutput(*libraries.run(chosen, *arrays, starts, scale=factor))
    kernels = module_of("gated_delta", chosen)
    output, final = run_kernels(kernels, *_prepare(*arrays), scale=factor)
    length, key_dim, value_dim = value.shape[1], key.shape[-1], value.shape[-1]
    return GatedDeltaOutput(output[:, :length, :, :value_dim], final[:, :, :key_dim, :value_dim])


def _prepare(query, key, value, log_decay, beta, initial_state) -> Inputs:
    """The kernels' inputs in their dtypes; length and widths are padded with zeros.

    Tokens with `beta = log_decay = 0` do not change the memory. Zero columns of keys and values
    keep the padded part of the memory at zero.
    """
    chex.assert_rank([query, key, value], 4)
    chex.assert_equal_shape([query, key])
    batch, length, heads, key_dim = key.shape
    chex.assert_shape(value, (batch, length, heads, None))
    chex.assert_shape([log_decay, beta], (batch, length, heads))
    chex.assert_axis_dimension_gt(key, 1, 0)
    memory = (batch, heads, key_dim, value.shape[-1])
    if initial_state is None:
        initial_state = jnp.zeros(memory, jnp.float32)
    chex.assert_shape(initial_state, memory)
    tokens = (query, key, value)
    dtype = jnp.bfloat16 if all(x.dtype == jnp.bfloat16 for x in tokens) else jnp.float32
    query, key, value = (_fill(x.astype(dtype), {1: CHUNK, 3: WIDTH_STEP}) for x in tokens)
    log_decay, beta = (_fill(x.astype(jnp.float32), {1: CHUNK}) for x in (log_decay, beta))
    state = _fill(initial_state.astype(jnp.float32), {2: WIDTH_STEP, 3: WIDTH_STEP})
    return Inputs(query, key, value, log_decay, beta, state)


def _fill(x: jax.Array, multiples: dict[int, int]) -> jax.Array:
    """Pads the end of each named axis with zeros to a multiple of the given number."""
    return jnp.pad(x, [(0, -n % multiples.get(axis, 1)) for axis, n in enumerate(x.shape)])


def _refuses(kernel: Implementation, query, key, value, *others: jax.Array | None) -> str | None:
    if kernel in LIBRARIES:
        return libraries.refuses(kernel, query, key, value, *others)
    arrays = (x for x in (query, key, value, *others) if x is not None)
    keys, values = key.shape[-1], value.shape[-1]
    return refusal(
        (any(x.dtype == jnp.float64 for x in arrays), "float64"),
        (keys > WIDEST_KEY, f"keys of width {keys}, at most {WIDEST_KEY}"),
        (values > WIDEST_VALUE, f"values of width {values}, at most {WIDEST_VALUE}"),
    )


GATED_DELTA = Operation(
    "chunk_gated_delta_rule",
    _refuses,
    check="pallas_kernels.gated_delta.specs:check",
    libraries=("jla", "deltanet_tpu"),
)
