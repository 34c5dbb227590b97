"""The executors of a memory of slots whose keys never read its values.

Such a memory is written in two phases: the keys of all chunks move first, in a scan over the keys
alone, and find every slot; then the values are read and written. Results and gradients are those of
the rule's `step`, chunk by chunk. There is an executor for each way to hold chunk and table:

| chunk and table | keys | values |
|---|---|---|
| whole sequences | `TwoPhase.run_groups` | `core.slots.values.run` |
| whole sequences, a table on several devices | `TwoPhase.run_groups` | `core.slots.options.devices` |
| one chunk too long to be formed at once | `TwoPhase.write_blocks` | `core.slots.options.blocks` |

Steps may be scaled by what earlier chunks left in a history of the slots (`core.slots.options.retention`),
as long as it does not need the values: the history is then a scan of its own between the phases.
Tokens that are written again (`core.slots.options.replay`) are chosen by write weight, so they are known
before the keys move. They stand before the tokens of each chunk and find their slots with them.
Rules for which this does not hold (their keys learn from the values, or a write goes over all rows)
scan their `step` with `core.chunks.scan_chunks`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, SlotIds, SlotWeights, SubKeys
from fwpkm_jax.core.chunks import (
    StepOutput,
    cast,
    cut_chunks,
    map_groups,
    merge_chunks,
    scan_chunks,
    uncut,
)
from fwpkm_jax.core.slots.chunk import SlotAccess, SlotChunk
from fwpkm_jax.core.slots.keys.addressing import (
    Address,
    SubKeyChoice,
)
from fwpkm_jax.core.slots.keys.scan import Find, KeyLoops, key_scan
from fwpkm_jax.core.slots.options.blocks import ChunkBlocks, write_in_blocks
from fwpkm_jax.core.slots.options.devices import MemoryAxes, split_value_run
from fwpkm_jax.core.slots.options.overlay import AnyTable, close_rows, open_groups
from fwpkm_jax.core.slots.options.replay import PlacesBefore, stored_before_chunks
from fwpkm_jax.core.slots.options.retention import SlotHistory
from fwpkm_jax.core.slots.values.exchange import RowOps
from fwpkm_jax.core.slots.values.run import ValueRunOutput, value_run
from fwpkm_jax.core.slots.write import (
    KeyWrite,
    ValueWrite,
    addressing_loss,
    sub_key_usage,
    usage_loss,
)


class TwoPhaseOutput(NamedTuple):
    """What whole sequences leave.

    Attributes:
      keys: after the last chunk.
      values: likewise.
      history: of the slots, likewise; None without one.
      output: what each token read.
      access: the slots that it read.
      addressing_loss: of each chunk, before its write; without a gradient.
      update_norm: norm of each chunk's change of the table.
    """

    keys: Float[Array, "groups heads 2 subkeys half"]
    values: AnyTable
    history: SlotHistory | None
    output: Float[Array, "groups batch length value"]
    access: SlotAccess
    addressing_loss: Float[Array, "groups chunks"]
    update_norm: Float[Array, "groups chunks"]


@dataclass(frozen=True, kw_only=True)
class TwoPhase:
    """Keys first, then values.

    Attributes:
      find: from queries and keys to the best sub-keys of each query.
      pair: from these to the address and the slots read; of any number of tokens.
      read: from values, slots and weights `[tokens, places]` to what is read.
      key_write: how the keys move.
      value_write: how the values move.
      ops: what reads and adds rows.
      inner_steps: value steps of a chunk; more than one for whole sequences on one device only.
      scale: from a history, slots, read weights, write weights and counted tokens of a chunk to
        what multiplies its steps, and the history after it; None: 1.
      key_loops: from keys and queries `[chunks, tokens, heads, key]` of one memory to what goes
        over its chunks.
    """

    find: Find
    pair: Callable[[SubKeyChoice], tuple[Address, SlotAccess]]
    read: Callable[[AnyTable, SlotIds, SlotWeights], jax.Array]
    key_write: KeyWrite
    value_write: ValueWrite
    ops: RowOps
    inner_steps: int = 1
    scale: Callable[..., tuple[SlotWeights, SlotHistory]] | None = None
    key_loops: Callable[[SubKeys, jax.Array], KeyLoops] = lambda keys, queries: KeyLoops()

    def run_groups(
        self,
        keys: Float[Array, "groups heads 2 subkeys half"],
        values: AnyTable,
        sequence: SlotChunk,
        *,
        chunk_size: int,
        history: SlotHistory | None = None,
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
          history: of the slots, for `scale` and of tokens that are written again; devices cannot
            share it.
          axes: inside `jax.shard_map`, how devices share each memory; None: they do not.
        """
        sequence = cast(sequence, values.dtype)
        if history is not None and history.replayed is not None:
            return self._run_with_replay(keys, values, sequence, history, chunk_size=chunk_size)
        return self._run(keys, values, sequence, history, chunk_size=chunk_size, axes=axes)

    def _run_with_replay(
        self,
        keys: Float[Array, "groups heads 2 subkeys half"],
        values: AnyTable,
        sequence: SlotChunk,
        history: SlotHistory,
        *,
        chunk_size: int,
    ) -> TwoPhaseOutput:
        """`run_groups` of a sequence with stored tokens before each chunk, which are written first.

        They move no keys and leave no trace in the rest of the history.
        """
        sequence = uncut(sequence, chunk_size)
        store = functools.partial(stored_before_chunks, chunk_size=chunk_size)
        stored, before = map_groups(store, history.replayed, sequence)
        _, batch, length = sequence.counted.shape
        layout = PlacesBefore(
            tokens=before.counted.shape[2], batch=batch, length=length, chunk_size=chunk_size
        )
        if sequence.factor is not None:
            before = before._replace(factor=jnp.ones_like(before.counted))
        joined, again = jax.tree.map(
            jax.vmap(layout.join),
            (before, jnp.ones_like(before.counted)),
            (sequence, jnp.zeros_like(sequence.counted)),
        )
        out = self._run(
            *(keys, values, joined, history._replace(replayed=None)),
            chunk_size=layout.joined_chunk_size,
            again=again,
        )
        assert out.history is not None
        output, access = jax.tree.map(jax.vmap(layout.own), (out.output, out.access))
        history = out.history._replace(replayed=stored)
        return out._replace(output=output, access=access, history=history)

    def _run(
        self,
        keys: Float[Array, "groups heads 2 subkeys half"],
        values: AnyTable,
        sequence: SlotChunk,
        history: SlotHistory | None,
        *,
        chunk_size: int,
        axes: MemoryAxes | None = None,
        again: Float[Array, "groups batch length"] | None = None,
    ) -> TwoPhaseOutput:
        """`run_groups` without replay; tokens with 1 in `again` are written before the others."""
        # Kernels update the keys in place, which several memories side by side do not allow.
        loops = self.key_loops if keys.shape[0] == 1 else lambda keys, queries: KeyLoops()
        find_slots = functools.partial(self._find_slots, chunk_size=chunk_size, key_loops=loops)
        if axes is not None and axes.tokens:
            find_slots = functools.partial(
                self._find_shared_slots, chunk_size=chunk_size, token_axes=axes.tokens
            )
        keys, access, losses = map_groups(find_slots, keys, sequence)
        run: Callable[..., ValueRunOutput] = value_run if axes is None else split_value_run
        more: dict[str, Any] = {"inner_steps": self.inner_steps, "again": again}
        if axes is not None:
            more = {"axes": axes}
        if self.scale is not None:
            own = 1.0 if again is None else 1.0 - again
            scale_steps = functools.partial(self._scale_steps, chunk_size=chunk_size)
            history, scales = map_groups(
                *(scale_steps, (history, access)),
                *(own * sequence.write_weight, own * sequence.counted),
            )
            if again is not None:  # These are written in full.
                scales = jnp.where(again[..., None] > 0, 1.0, scales)
            more["scales"] = scales
        opened = open_groups(values, access.slot_ids, sequence.counted)
        out = run(
            *(opened.rows, opened.slot_ids, access.slot_weights, sequence.target),
            error_weights=sequence.error_weight,
            counted=sequence.counted,
            write=self.value_write,
            chunk_size=chunk_size,
            ops=self.ops,
            **more,
        )
        values = close_rows(opened.values, out.values)
        return TwoPhaseOutput(keys, values, history, out.output, access, losses, out.update_norm)

    def write_blocks(
        self, keys: SubKeys, values: AnyTable, blocks: ChunkBlocks
    ) -> tuple[SubKeys, AnyTable]:
        """Keys and values of one memory after one write of a chunk given as blocks."""
        block = blocks.block
        return write_in_blocks(
            *(keys, values),
            blocks._replace(block=lambda number: cast(block(number), values.dtype)),
            select=self._select,
            read=self.read,
            key_write=self.key_write,
            value_write=self.value_write,
            ops=self.ops,
        )

    def _select(self, keys: SubKeys, queries: Queries) -> tuple[Address, SlotAccess]:
        return self.pair(self.find(queries, keys))

    def _find_slots(
        self,
        keys: SubKeys,
        sequence: SlotChunk,
        *,
        chunk_size: int,
        key_loops: Callable[[SubKeys, jax.Array], KeyLoops],
    ) -> tuple[SubKeys, SlotAccess, Float[Array, " chunks"]]:
        """The keys after the last chunk, the slots that each token read, and the chunks' losses."""
        batch = sequence.query.shape[0]
        uncut(sequence, chunk_size)
        whole, rest = cut_chunks((sequence.query, sequence.addressed), chunk_size)
        if rest is not None:
            rest = jax.tree.map(lambda x: x[None], rest)
        found = []
        for chunks in (part for part in (whole, rest) if part is not None):
            keys, choice = key_scan(
                *(keys, *chunks),
                find=self.find,
                key_write=self.key_write,
                loops=key_loops(keys, chunks[0]),
            )
            loss_of = functools.partial(_loss, num_subkeys=keys.shape[2])
            losses = jax.lax.stop_gradient(jax.vmap(loss_of)(choice, chunks[1]))
            found.append((self._slots_of(choice, batch), losses))
        accesses, losses = zip(*found, strict=True)
        access = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *accesses)
        return keys, access, jnp.concatenate(losses)

    def _scale_steps(
        self,
        history_and_access: tuple[SlotHistory, SlotAccess],
        write_weight: Float[Array, "batch length"],
        counted: Float[Array, "batch length"],
        *,
        chunk_size: int,
    ) -> tuple[SlotHistory, Float[Array, "batch length places"]]:
        """The history after the last chunk, and what multiplies the steps of every place."""
        assert self.scale is not None

        def step(history: SlotHistory, chunk: tuple[jax.Array, ...]) -> StepOutput:
            assert self.scale is not None
            scales, history = self.scale(history, *chunk)
            return StepOutput(history, scales, (), ())

        history, access = history_and_access
        places = (*access, write_weight, counted)
        out = scan_chunks(step, history, places, chunk_size=chunk_size)
        return out.memory, out.output

    def _slots_of(self, choice: SubKeyChoice, batch: int) -> SlotAccess:
        """The slots of all chunks at once, leaves `[batch, length, places]`: they move no keys."""
        chunks, tokens = choice.sub_key_ids.shape[:2]
        _, access = self.pair(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), choice))
        return jax.tree.map(lambda x: merge_chunks(x.reshape(chunks, tokens, -1), batch), access)

    def _find_shared_slots(
        self,
        keys: SubKeys,
        sequence: SlotChunk,
        *,
        chunk_size: int,
        token_axes: tuple[str, ...],
    ) -> tuple[SubKeys, SlotAccess, Float[Array, " chunks"]]:
        """`_find_slots` where other devices hold other tokens of each chunk."""
        move = functools.partial(self._move_keys, token_axes=token_axes)
        keys, _, access, losses = scan_chunks(move, keys, sequence, chunk_size=chunk_size)
        return keys, access, losses

    def _move_keys(
        self, keys: SubKeys, chunk: SlotChunk, *, token_axes: tuple[str, ...]
    ) -> StepOutput:
        """One chunk's slots, and the keys after it.

        Devices that hold other tokens of the chunk add up how all of them use and move the keys.
        """
        address, access = self._select(keys, chunk.query)
        options = {"num_subkeys": keys.shape[2], "token_weights": chunk.addressed}
        usage = jax.lax.psum(sub_key_usage(address, **options), token_axes)
        gradient = self.key_write.gradient(
            keys, chunk.query, address, token_weights=chunk.addressed, usage=usage
        )
        keys = self.key_write.step(keys, jax.lax.psum(gradient, token_axes))
        nothing_read = jnp.zeros((chunk.query.shape[0], 0), keys.dtype)
        return StepOutput(keys, nothing_read, access, usage_loss(usage))


def _loss(choice: SubKeyChoice, token_weights: jax.Array, *, num_subkeys: int) -> jax.Array:
    return addressing_loss(choice, num_subkeys=num_subkeys, token_weights=token_weights)
