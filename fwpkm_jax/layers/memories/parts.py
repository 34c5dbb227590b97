"""How the devices of a mesh read and write memories, also with parts of the same sequences."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from fwpkm_jax.core.chunks import (
    AnyChunk,
    Memory,
    RunOutput,
    merge_groups,
    split_groups,
    strip_chunk_size,
)
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.sequence.sequential import sequential_pass
from fwpkm_jax.core.slots.options.devices import MemoryAxes
from fwpkm_jax.core.streams.streaming import read_sequences
from fwpkm_jax.layers.memories.checks import check_no_overlay, check_parts
from fwpkm_jax.layers.memories.config import FastWeightConfig
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.rules import AbstractChunkRule


def read_or_run(
    config: FastWeightConfig,
    memory: Memory,
    sequence: AnyChunk,
    *,
    write: bool,
    partition: Partition | None,
) -> RunOutput:
    """What sequences read, and the memory after them: frozen, or on several devices, or both.

    Args:
      memory: leaves `[groups, ...]`.
      sequence: leaves `[batch, length, ...]`.
      write: False leaves the memory as it is, and reports nothing of writes.
      partition: of both over devices; None: one device.

    Returns:
      Output and access by sequence, leaves `[batch, length, ...]`.
    """
    groups = jax.tree.leaves(memory)[0].shape[0]
    split = split_groups if partition is None else partition.split_groups
    merge = merge_groups if partition is None else partition.merge_groups
    grouped = jax.tree.map(lambda leaf: split(leaf, groups), sequence)
    if not write:
        read, access = read_partitioned(config.rule, memory, grouped.query, partition)
        out = RunOutput(memory, read, access, None)
    else:
        assert partition is not None  # The plain way is the layer's own.
        out = run_partitioned(config, memory, grouped, partition)
    output, access = jax.tree.map(merge, (out.output, out.access))
    return out._replace(output=output, access=access)


def run_partitioned(
    config: FastWeightConfig, memory: Memory, grouped: AnyChunk, partition: Partition
) -> RunOutput:
    """`run_groups` with each device's sequences and its part of the memories.

    Args:
      memory: leaves `[groups, ...]`.
      grouped: the sequences, leaves `[groups, members, length, ...]`.

    Raises:
      ValueError: memories or sequences do not divide into the parts of the mesh.
    """
    rule, chunk_size = config.rule, config.chunk_size
    check_no_overlay(memory)
    axes, sequence = partition.axes_of(rule), partition.sequence
    memory_specs = partition.memory_specs(rule, memory)
    groups, members, length = grouped.write_weight.shape[:3]
    partition.check_groups(groups, members)
    if sequence is not None:
        check_parts(config, length, sequence)
    along = None if sequence is None else sequence.name
    among = () if axes is None else tuple(axis for axis in axes.tokens if axis != along)
    tokens = P(partition.group_axes, among, along)
    columns = () if axes is None else axes.target_columns
    # Targets lie as the columns of the table, which need no other column.
    values: Any = P(partition.group_axes, among, along, columns)
    sequence_specs = jax.tree.map(lambda _: tokens, grouped)._replace(target=values)
    chunks = P(partition.group_axes, along if axes is None else None)
    run = functools.partial(run_parts, rule, chunk_size=chunk_size, axes=axes, along=sequence)
    return partition.run(
        run,
        in_specs=(memory_specs, sequence_specs),
        out_specs=RunOutput(memory_specs, values, tokens, chunks),
    )(memory, grouped)


def read_partitioned(
    rule: AbstractChunkRule, memory: Memory, query: jax.Array, partition: Partition | None
) -> Any:
    """What queries `[groups, members, length, ...]` read, each device those of its tokens.

    Raises:
      ValueError: memories or sequences do not divide into the parts of the mesh.
    """
    if partition is None:
        return read_sequences(rule.read, memory, query)
    check_no_overlay(memory)
    groups, members = query.shape[:2]
    partition.check_groups(groups, members)
    among = () if partition.memory == "independent" else ("fsdp",)
    axis = partition.sequence
    tokens = P(partition.group_axes, among, None if axis is None else axis.name)
    return partition.run(
        lambda memory, query: read_sequences(rule.read, memory, query),
        in_specs=(P(partition.group_axes), tokens),
        out_specs=tokens,
    )(memory, query)


def run_parts(
    rule: AbstractChunkRule,
    memory: Memory,
    sequence: AnyChunk,
    *,
    chunk_size: int,
    axes: MemoryAxes | None,
    along: SequenceAxis | None,
) -> RunOutput:
    """`rule.run_groups` of this device's tokens, inside `jax.shard_map`.

    A table that devices share by columns or slots is written by all of them at the same time: they
    exchange tokens, so that each has an equal share of every chunk. A memory that cannot be split
    goes from device to device instead (`core.sequence.sequential`), and each device has the whole
    of it afterwards.

    Args:
      rule: of one memory.
      memory: this device's part, leaves `[groups, ...]`.
      sequence: this device's tokens, leaves `[groups, members, length, ...]`; whole chunks.
      chunk_size: tokens of a sequence between two writes.
      axes: how devices share a memory; None: each has its own, whole.
      along: the axis over which sequences lie; None: devices have whole sequences.
    """
    if along is None:
        return rule.run_groups(memory, sequence, chunk_size=chunk_size, axes=axes)
    if axes is not None:
        sequence = strip_chunk_size(sequence, chunk_size)
        interleaved = jax.tree.map(lambda x: along.interleave_chunks(x, chunk_size), sequence)
        # Each device gets every n-th stretch of a chunk, so all of them write each chunk together.
        share = chunk_size // along.size
        out = rule.run_groups(memory, interleaved, chunk_size=share, axes=axes)
        output, access = jax.tree.map(
            lambda x: along.collect_chunks(x, chunk_size), (out.output, out.access)
        )
        return out._replace(output=output, access=access)

    def write(memory: Memory, part: AnyChunk) -> Any:
        return rule.run_groups(memory, part, chunk_size=chunk_size).memory

    # Two passes: the memory before each part, then all parts side by side.
    before = sequential_pass(write, memory, sequence, axis=along)
    out = rule.run_groups(before, sequence, chunk_size=chunk_size)
    return out._replace(memory=along.from_last(out.memory))
