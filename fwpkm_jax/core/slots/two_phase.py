"""The executors of a memory of slots whose keys never read its values.

Such a memory is written in two phases: the keys of all chunks move first, in a scan over the keys
alone, and find every slot; then the values are read and written. Results and gradients are those of
the rule's `step`, chunk by chunk. There is an executor for each way to hold chunk and table:

| chunk and table | keys | values |
|---|---|---|
| whole sequences | `TwoPhase.run_groups` | `core.slots.value_run` |
| whole sequences, a table on several devices | `TwoPhase.run_groups` | `core.slots.split_table` |
| one chunk too long to be formed at once | `TwoPhase.write_blocks` | `core.slots.block_write` |

Rules for which this does not hold (their keys learn from the values, or a write goes over all rows)
scan their `step` with `core.chunks.scan_chunks`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, SlotIds, SlotWeights, SubKeys
from fwpkm_jax.core.chunks import StepOutput, cast, map_groups, scan_chunks
from fwpkm_jax.core.slots.addressing import Address, addressing_loss, sub_key_usage
from fwpkm_jax.core.slots.block_write import ChunkBlocks, write_in_blocks
from fwpkm_jax.core.slots.chunk import SlotAccess, SlotChunk
from fwpkm_jax.core.slots.key_write import KeyWrite
from fwpkm_jax.core.slots.overlay import AnyTable, close_rows, open_groups
from fwpkm_jax.core.slots.row_ops import RowOps
from fwpkm_jax.core.slots.split_table import MemoryAxes, split_value_run
from fwpkm_jax.core.slots.value_run import value_run


class TwoPhaseOutput(NamedTuple):
    """What whole sequences leave.

    Attributes:
      keys: after the last chunk.
      values: likewise.
      output: what each token read.
      access: the slots that it read.
      addressing_loss: of each chunk, before its write.
      update_norm: norm of each chunk's change of the table.
    """

    keys: Float[Array, "groups heads 2 subkeys half"]
    values: AnyTable
    output: Float[Array, "groups batch length value"]
    access: SlotAccess
    addressing_loss: Float[Array, "groups chunks"]
    update_norm: Float[Array, "groups chunks"]


@dataclass(frozen=True, kw_only=True)
class TwoPhase:
    """Keys first, then values.

    Attributes:
      select: from keys and queries to addresses and the slots read.
      read: from values, slots and weights `[tokens, places]` to what is read.
      key_write: how the keys move.
      step_size: multiplies the mean error of a slot.
      ops: what reads and adds rows.
    """

    select: Callable[[SubKeys, Queries], tuple[Address, SlotAccess]]
    read: Callable[[AnyTable, SlotIds, SlotWeights], jax.Array]
    key_write: KeyWrite
    step_size: float
    ops: RowOps

    def run_groups(
        self,
        keys: Float[Array, "groups heads 2 subkeys half"],
        values: AnyTable,
        sequence: SlotChunk,
        *,
        chunk_size: int,
        axes: MemoryAxes | None = None,
    ) -> TwoPhaseOutput:
        """Whole sequences of several memories.

        Where devices share a memory, each finds the slots of its own tokens with its own copy of
        the keys, and holds a part of the values.

        Args:
          keys: before the first chunk.
          values: likewise, `[groups, slots, value]`; this device's part.
          sequence: leaves `[groups, batch, length, ...]`; this device's part.
          chunk_size: tokens of a sequence between two writes.
          axes: inside `jax.shard_map`, how devices share each memory; None: they do not.
        """
        sequence = cast(sequence, values.dtype)
        move = functools.partial(self._move_keys, token_axes=() if axes is None else axes.tokens)
        keys, _, access, losses = map_groups(
            lambda keys, part: scan_chunks(move, keys, part, chunk_size=chunk_size), keys, sequence
        )
        run = value_run if axes is None else functools.partial(split_value_run, axes=axes)
        opened = open_groups(values, access.slot_ids, sequence.counted)
        out = run(
            *(opened.rows, opened.slot_ids, access.slot_weights, sequence.target),
            error_weights=sequence.error_weight,
            counted=sequence.counted,
            step_size=self.step_size,
            chunk_size=chunk_size,
            ops=self.ops,
        )
        values = close_rows(opened.values, out.values)
        return TwoPhaseOutput(keys, values, out.output, access, losses, out.update_norm)

    def write_blocks(
        self, keys: SubKeys, values: AnyTable, blocks: ChunkBlocks
    ) -> tuple[SubKeys, AnyTable]:
        """Keys and values of one memory after one write of a chunk given as blocks."""
        block = blocks.block
        return write_in_blocks(
            *(keys, values),
            blocks._replace(block=lambda number: cast(block(number), values.dtype)),
            select=self.select,
            read=self.read,
            key_write=self.key_write,
            step_size=self.step_size,
            ops=self.ops,
        )

    def _move_keys(
        self, keys: SubKeys, chunk: SlotChunk, *, token_axes: tuple[str, ...]
    ) -> StepOutput:
        """One chunk's slots, and the keys after it.

        Devices that hold other tokens of the chunk add up how all of them use and move the keys.
        """
        address, access = self.select(keys, chunk.query)
        options = {"num_subkeys": keys.shape[2], "token_weights": chunk.addressed}
        usage = None
        if token_axes:
            usage = jax.lax.psum(sub_key_usage(address, **options), token_axes)
        gradient = self.key_write.gradient(keys, chunk, address, usage=usage)
        if token_axes:
            gradient = jax.lax.psum(gradient, token_axes)
        loss = addressing_loss(address, **options, usage=usage)
        nothing_read = jnp.zeros((chunk.query.shape[0], 0), keys.dtype)
        return StepOutput(self.key_write.step(keys, gradient), nothing_read, access, loss)
