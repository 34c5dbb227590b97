"""How a batch is split into micro-batches, and which memory each micro-batch starts from."""

from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.training.state import Memories, MemoryConfig

Batch = dict[str, Any]
"""Arrays `[batch, ...]` by name: `tokens`, `loss_weight` and what the data source adds."""


def check_split(batch_size: int, *, micro_batches: int, memory: MemoryConfig) -> None:
    """Raises ValueError if sequences do not divide evenly into micro-batches and memories."""
    if batch_size % micro_batches:
        raise ValueError(
            f"training.batch_size={batch_size} does not split into "
            f"training.micro_batches={micro_batches}; make micro_batches a divisor of batch_size."
        )
    if memory.lifetime == "batch":
        if memory.groups % micro_batches:
            raise ValueError(
                f"training.memory.groups={memory.groups} does not split into "
                f"training.micro_batches={micro_batches}: a memory that lives one batch belongs "
                "to one micro-batch; make groups a multiple "
                "of micro_batches, or carry the memory with training.memory.lifetime=carried."
            )
        if batch_size % memory.groups:
            raise ValueError(
                f"training.memory.groups={memory.groups} does not divide training.batch_size="
                f"{batch_size}; make it a divisor."
            )
    elif (batch_size // micro_batches) % memory.groups:
        raise ValueError(
            f"training.memory.groups={memory.groups} does not divide the "
            f"{batch_size // micro_batches} sequences of a micro-batch (training.batch_size="
            f"{batch_size}, training.micro_batches={micro_batches}); lower groups or micro_batches."
        )


def split_batch(batch: Batch, *, micro_batches: int, memory: MemoryConfig) -> Batch:
    """The batch with a leading micro-batch axis; each memory keeps its own sequences.

    Each memory owns a run of consecutive sequences of the batch. If memories are carried, every
    micro-batch holds an equal part of each memory's run. If they live for one batch, every
    micro-batch holds whole runs, so the split changes only the order of sums.

    Args:
      batch: arrays `[batch, ...]`.
      micro_batches: number of pieces, see `check_split`.

    Returns:
      Arrays `[micro_batches, batch // micro_batches, ...]`.
    """

    def split(x: jax.Array) -> jax.Array:
        if memory.lifetime == "batch":
            return x.reshape(micro_batches, -1, *x.shape[1:])
        parts = x.reshape(memory.groups, micro_batches, -1, *x.shape[1:])
        return jnp.swapaxes(parts, 0, 1).reshape(micro_batches, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


def deal_batch(batch: Batch, memory: Memories, partition: Partition | None) -> Batch:
    """A micro-batch in the order that the devices expect, see `Partition.interleave`."""
    if partition is None:
        return batch
    groups = jax.tree.leaves(memory)[0].shape[0] if memory else 1
    return jax.tree.map(lambda x: partition.interleave(x, groups), batch)


def broadcast_memory(memory: Memories, groups: int) -> Memories:
    """Repeats one group's memory, leaves `[1, ...]`, to leaves `[groups, ...]`."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (groups, *x.shape[1:])), memory)


def micro_batch_memory(memory: Memories, config: MemoryConfig, micro_batches: int) -> Memories:
    """The memory that a micro-batch starts from, made from the memory in the state."""
    if config.lifetime == "carried":
        return memory
    return broadcast_memory(memory, config.groups // micro_batches)
