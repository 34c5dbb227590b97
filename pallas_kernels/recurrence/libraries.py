"""Kernels of other packages for matrix memories: jax-linear-attention's and deltanet-tpu's.

Each has kernels for five kinds of tokens: with a decay per head, per key channel or none, that add
or that take delta steps. The packages are imported where their kernels are chosen.
"""

import importlib
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from pallas_kernels.dispatch import Implementation
from pallas_kernels.refusals import refusal

WIDTHS = {"jla": (64, 128), "deltanet_tpu": (128,)}
"""Widths of keys and values that the kernels of each package take."""


def run(
    library: Implementation,
    query: Float[Array, "batch length heads key"],
    key: Float[Array, "batch length heads key"],
    value: Float[Array, "batch length heads value"],
    log_decay: Array | None,
    beta: Float[Array, "batch length heads"] | None,
    state: Float[Array, "batch heads key value"] | None,
    starts: Bool[Array, "batch length"] | None,
    *,
    scale: float,
) -> RecurrenceOutput:
    """What a package's kernels read, and the memory after the last token, both float32.

    Arguments as those of `linear_recurrence`; `scale` multiplies the queries.
    """
    documents = None
    if starts is not None:
        # Their first document always goes on with the memory that is given.
        documents = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
        if state is not None:
            state = jnp.where(starts[:, 0, None, None, None], 0, state)
    if log_decay is None and beta is None:
        log_decay = jnp.zeros(query.shape[:3], jnp.float32)
    gates = {"g": log_decay, "beta": beta}
    how: dict[str, Any] = {
        name: x.astype(jnp.float32) for name, x in gates.items() if x is not None
    }
    how |= {"scale": scale, "output_final_state": True, "segment_ids": documents}
    how["initial_state"] = None if state is None else state.astype(jnp.float32)
    output, final = {"jla": _jla, "deltanet_tpu": _deltanet_tpu}[library](query, key, value, how)
    return RecurrenceOutput(output.astype(jnp.float32), final)


def refuses(library: Implementation, query, key, value, log_decay, beta, _) -> str | None:
    """None, or why a package's kernels do not take these arrays."""
    widths, taken = (key.shape[-1], value.shape[-1]), WIDTHS[library]
    columns = key.shape[2] * key.shape[3]
    by_channel = log_decay is not None and log_decay.ndim == 4
    arrays = (x for x in (query, key, value, log_decay, beta) if x is not None)
    return refusal(
        (any(x.dtype == jnp.float64 for x in arrays), "float64"),
        (key.shape[1] != query.shape[1], "several writes per token"),
        (
            not {*widths} <= {*taken},
            f"keys of width {widths[0]} and values of width {widths[1]}, only "
            f"{' and '.join(map(str, taken))}",
        ),
        (
            library == "jla" and by_channel and columns % 128 > 0,
            f"{columns} key columns of all heads, only multiples of 128 where channels decay",
        ),
    )


def _jla(query, key, value, how):
    by_channel = "g" in how and how["g"].ndim == 4
    if "beta" in how:
        kind = "kda" if by_channel else "gated_deltanet" if "g" in how else "deltanet"
    else:
        kind = "gla" if by_channel else "simple_gla"
    tokens = (x.astype(jnp.bfloat16) for x in (query, key, value))
    linear_attention = importlib.import_module("jla.ops").linear_attention
    return linear_attention(kind, *tokens, impl="mosaic_gpu", **how)


def _deltanet_tpu(query, key, value, how):
    by_channel = "g" in how and how["g"].ndim == 4
    if "beta" in how:
        rule = "chunk_kda" if by_channel else "chunk_gdn" if "g" in how else "chunk_delta_rule"
    else:
        rule = "chunk_gla"
    precision = "bf16" if value.dtype == jnp.bfloat16 else "fp32"
    call = getattr(importlib.import_module("deltanet_tpu"), rule)
    return call(query, key, value, precision=precision, **how)
