"""How devices that hold parts of the same sequences read and write one memory."""

from typing import Any

import jax

from fwpkm_jax.core.chunks import AnyChunk, Memory, RunOutput, uncut
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.sequence.in_turn import state_in_turn
from fwpkm_jax.core.slots.split_table import MemoryAxes
from fwpkm_jax.rules import AbstractChunkRule


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
    goes from device to device instead (`core.sequence.in_turn`), and each device has the whole of
    it afterwards.

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
        sequence = uncut(sequence, chunk_size)
        dealt = jax.tree.map(lambda x: along.deal_chunks(x, chunk_size, dim=2), sequence)
        share = chunk_size // along.size
        out = rule.run_groups(memory, dealt, chunk_size=share, axes=axes)
        output, access = jax.tree.map(
            lambda x: along.collect_chunks(x, chunk_size, dim=2), (out.output, out.access)
        )
        return out._replace(output=output, access=access)

    def write(memory: Memory, part: AnyChunk) -> Any:
        return rule.run_groups(memory, part, chunk_size=chunk_size).memory

    before = state_in_turn(write, memory, sequence, axis=along)
    out = rule.run_groups(before, sequence, chunk_size=chunk_size)
    return out._replace(memory=along.from_last(out.memory))
