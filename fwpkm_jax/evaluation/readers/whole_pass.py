"""Compiled passes over batches of whole rows, shared by all evaluations of a process.

There are no caches and no queues: every row starts at position 0, as in training.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from fwpkm_jax.core.cross_entropy import linear_cross_entropy
from fwpkm_jax.data.packing import PackedRows
from fwpkm_jax.evaluation.readers.devices import (
    memory_on_devices,
    model_on_devices,
    rows_on_devices,
)
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype, as_stored
from fwpkm_jax.layers.partition import BATCH, HEADS, SEQUENCE, Partition
from fwpkm_jax.models.language_model import LanguageModel, Memory

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


class RowReader:
    """Reads batches of rows; all rows of a batch write into one memory, which is carried on."""

    def __init__(
        self,
        model: LanguageModel,
        memory: Memory,
        *,
        fast_weight_dtype: FastWeightDtype = "float32",
        partition: Partition | None = None,
    ):
        """Starts from `memory`, leaves `[1, ...]`; for the options see `write_rows`."""
        self._weights = nnx.split(model_on_devices(partition, model))
        # Copied: the buffers are donated, and the caller's memory is needed again.
        memory = jax.tree.map(jnp.copy, memory_on_devices(partition, memory))
        self.memory = as_stored(memory, fast_weight_dtype)
        self._dtype: FastWeightDtype = fast_weight_dtype
        self._partition = partition

    def write(self, rows: np.ndarray) -> dict[str, jax.Array]:
        """Reads rows `[batch, length + 1]`; returns gates `[batch, length]` by memory layer."""
        self.memory, gates = write_rows(
            *self._weights,
            self.memory,
            rows,
            fast_weight_dtype=self._dtype,
            partition=self._partition,
        )
        return gates

    def losses(self, rows: np.ndarray) -> jax.Array:
        """Mean loss of each row in nats, `[batch]`; the memory is not written."""
        return frozen_row_losses(*self._weights, self.memory, rows, partition=self._partition)


@partial(
    jax.jit,
    static_argnames=("graphdef", "fast_weight_dtype", "partition"),
    donate_argnames="memory",
)
def write_rows(
    graphdef: Any,
    params: Any,
    memory: Memory,
    tokens: jax.Array,
    *,
    fast_weight_dtype: FastWeightDtype,
    partition: Partition | None = None,
) -> tuple[Memory, dict[str, jax.Array]]:
    """The memory after a batch of rows was read, and gates `[batch, length]` by memory layer.

    Args:
      params: its slow weights.
      memory: fast weights, leaves `[groups, ...]`; its buffers are reused.
      tokens: `[batch, length + 1]`; the last token of a row is not read.
      fast_weight_dtype: precision that the returned memory is rounded to.
      partition: devices that share the rows; None: one.
    """
    model, inputs = nnx.merge(graphdef, params), tokens[:, :-1]
    rows = rows_on_devices(partition, model, inputs, memory)
    hidden = model.hidden(rows.tokens, memory, **rows.options)
    gates = {layer: facts.gate[:, : inputs.shape[1]] for layer, facts in hidden.info.items()}
    written = hidden.memory
    if partition is not None:  # As it came, so that its buffers can be reused.
        written = jax.lax.with_sharding_constraint(written, partition.sharding())
    return as_stored(written, fast_weight_dtype), gates


@partial(jax.jit, static_argnames=("graphdef", "partition"))
def frozen_row_losses(
    graphdef: Any,
    params: Any,
    memory: Memory,
    tokens: jax.Array,
    *,
    partition: Partition | None = None,
) -> jax.Array:
    """Mean loss of each row in nats, `[batch]`, with writing disabled.

    Args:
      params: its slow weights.
      memory: fast weights, leaves `[groups, ...]`.
      tokens: `[batch, length + 1]`; labels are the inputs shifted by one.
      partition: devices that share the rows; None: one.
    """
    model, length = nnx.merge(graphdef, params), tokens.shape[1] - 1
    rows = rows_on_devices(partition, model, tokens[:, :-1], memory)
    x = model.hidden(rows.tokens, memory, write=False, **rows.options).x
    padding = ((0, 0), (0, x.shape[1] - length))
    labels = jnp.pad(tokens[:, 1:], padding)
    weights = jnp.pad(jnp.ones((len(tokens), length), jnp.float32), padding)

    def row_losses(readout: Any, *rows: jax.Array) -> jax.Array:
        head, bias = readout

        def row_loss(row: tuple[jax.Array, ...]) -> jax.Array:
            x, labels, weights = row
            return linear_cross_entropy(x, head, bias, labels, weights, block=_BLOCK) / length

        return jax.lax.map(row_loss, rows)

    if partition is None:
        return row_losses(model.readout(), x, labels, weights)
    token_axes = (SEQUENCE, HEADS) if partition.sequence is not None else (HEADS,)
    own = partition.tokens(also=(HEADS,))
    return partition.run(
        lambda *arguments: jax.lax.psum(row_losses(*arguments), token_axes),
        in_specs=(P(), own, own, own),
        out_specs=P(BATCH),
    )(model.readout(), x, labels, weights)
