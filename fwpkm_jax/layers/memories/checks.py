"""Refuses what a memory layer cannot take, by a ValueError that names the way out."""

import jax

from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.chunks import Memory, shares
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.streams.pending import Pending
from fwpkm_jax.layers.memories.config import FastWeightConfig
from fwpkm_jax.layers.partition import BATCH, Partition
from fwpkm_jax.rules import AbstractChunkRule
from fwpkm_jax.rules.base import check_memory


def check_parts(config: FastWeightConfig, length: int, sequence: SequenceAxis) -> None:
    """Refuses parts of a sequence whose chunks would lie over two devices."""
    size, splits = config.chunk_size, config.rule.supports_sharding
    if length % (size * sequence.size):
        raise ValueError(
            f"chunk_size={size} with mesh.sequence={sequence.size}: parts of {length} tokens "
            "must be whole chunks; choose a divisor of length / mesh.sequence."
        )
    if splits and size % sequence.size:
        raise ValueError(
            f"chunk_size={size} does not divide into mesh.sequence={sequence.size} parts, of "
            "which each device reads one; make it a multiple."
        )


def check_sequences(rule: AbstractChunkRule, memory: Memory, batch: int) -> None:
    """Refuses a memory of several sequences for a rule that writes token by token."""
    groups = jax.tree.leaves(memory)[0].shape[0]
    if groups != batch:
        raise ValueError(
            f"{type(rule).__name__} with {groups} memories for {batch} sequences: it writes token "
            "by token, and the tokens of several sequences have no order; give each sequence its "
            "own (training.memory.groups)."
        )


def check_no_overlay(memory: Memory) -> None:
    """Refuses an overlay, which no mesh takes."""
    if shares(memory):
        raise ValueError(
            "memory is an overlay, which runs on one device; set all sizes of the mesh to 1, "
            "or make it private (overlays.to_private)."
        )


def check_stream(memory: Memory, partition: Partition) -> None:
    """Refuses a mesh that does not hold the memories of a stream whole."""
    check_no_overlay(memory)
    if partition.memory != "independent":
        raise ValueError(
            f"mesh.memory={partition.memory!r} with a stream, whose devices have whole "
            "memories; set mesh.memory=independent."
        )
    groups = jax.tree.leaves(memory)[0].shape[0]
    partition.check_divides("Memories of a stream", groups, *BATCH)


def check_initial(
    rule: AbstractChunkRule, memory: Memory, initial: Memory | None, batch: int
) -> None:
    """Refuses a stream of documents of their own without a fitting memory to start from."""
    if initial is None:
        raise ValueError(
            "initial=None with documents='document': documents that start in a stream need the "
            "memory they start from; pass the one that the stream started with, or use "
            "documents='carry'."
        )
    check_memory(rule, initial, groups=True)
    check_own_memory(memory, batch, None)
    check_own_memory(initial, batch, None)


def check_own_memory(memory: Memory, batch: int, partition: Partition | None) -> None:
    """Refuses memories that documents of their own cannot have."""
    if shares(memory):
        raise ValueError(
            "memory is an overlay, which takes no documents='document'; use "
            "documents='carry', or make it private (overlays.to_private)."
        )
    groups = jax.tree.leaves(memory)[0].shape[0]
    if groups != batch:
        raise ValueError(
            f"documents='document' with {groups} memories for {batch} sequences: documents of "
            "one sequence would end another's memory; give each sequence its own "
            "(training.memory.groups), or use documents='carry'."
        )
    if partition is None:
        return
    if partition.memory != "independent":
        raise ValueError(
            f"mesh.memory={partition.memory!r} with documents='document', which needs each memory "
            "whole on one device; set mesh.memory=independent, or use documents='carry'."
        )
    partition.check_groups(groups, 1)


def check_pending(pending: Pending, memory: Memory, batch: int | None = None) -> None:
    """Refuses waiting tokens of other memories."""
    groups = jax.tree.leaves(memory)[0].shape[0]
    sizes = {"groups": groups}
    if batch is not None and batch % groups == 0:  # Otherwise `split_groups` refuses the batch.
        sizes["members"] = batch // groups
    waiting = {"pending.tokens.gate": (pending.tokens.gate, "float groups members capacity")}
    check_arrays(sizes=sizes, **waiting)
