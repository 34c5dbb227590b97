"""Compiled passes over batches of whole rows, shared by all evaluations of a process.

There are no caches and no queues: every row starts at position 0, as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.core.cross_entropy import linear_cross_entropy
from fwpkm_jax.data.packing import PackedRows
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype, as_stored
from fwpkm_jax.models.language_model import Memory

_BLOCK = 1024  # Number of tokens whose logits are in memory at the same time.


def row_batches(
    rows: PackedRows, indices: range, *, batch_size: int, keep_last: bool
) -> Iterator[np.ndarray]:
    """Batches of consecutive rows, int32 `[batch, length + 1]`.

    An incomplete last batch is yielded if `keep_last`, otherwise left out.
    """
    for start in range(0, len(indices), batch_size):
        chosen = indices[start : start + batch_size]
        if len(chosen) == batch_size or keep_last:
            yield np.stack([rows[index]["tokens"] for index in chosen])


@partial(jax.jit, static_argnames=("graphdef", "fast_weight_dtype"), donate_argnames="memory")
def write_rows(
    graphdef: Any,
    params: Any,
    memory: Memory,
    tokens: jax.Array,
    *,
    fast_weight_dtype: FastWeightDtype,
) -> tuple[Memory, dict[str, jax.Array]]:
    """The memory after a batch of rows was read, and gates `[batch, length]` by memory layer.

    Args:
      graphdef: the model's structure.
      params: its slow weights.
      memory: fast weights, leaves `[groups, ...]`; its buffers are reused.
      tokens: `[batch, length + 1]`; the last token of a row is not read.
      fast_weight_dtype: precision that the returned memory is rounded to.
    """
    hidden = nnx.merge(graphdef, params).hidden(tokens[:, :-1], memory)
    gates = {layer: facts.gate for layer, facts in hidden.info.items()}
    return as_stored(hidden.memory, fast_weight_dtype), gates


@partial(jax.jit, static_argnames="graphdef")
def frozen_row_losses(graphdef: Any, params: Any, memory: Memory, tokens: jax.Array) -> jax.Array:
    """Mean loss of each row in nats, `[batch]`, with writing disabled.

    Args:
      graphdef: the model's structure.
      params: its slow weights.
      memory: fast weights, leaves `[groups, ...]`.
      tokens: `[batch, length + 1]`; labels are the inputs shifted by one.
    """
    model = nnx.merge(graphdef, params)
    x = model.hidden(tokens[:, :-1], memory, write=False).x
    length = x.shape[1]

    head, bias = model.readout()

    def row_loss(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        weights = jnp.ones(length, jnp.float32)
        total = linear_cross_entropy(row[0], head, bias, row[1], weights, block=_BLOCK)
        return total / length

    return jax.lax.map(row_loss, (x, tokens[:, 1:]))
