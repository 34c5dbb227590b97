"""A stream reader that logs which token wrote which slot, and which slots an answer read."""

import array
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from fwpkm_jax.core.chunks import Memory, map_unshared
from fwpkm_jax.evaluation.readers.slot_log import Entry, SlotLog
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.rules import AbstractChunkRule


class SlotRead(NamedTuple):
    """A slot read for a token of the answer."""

    slot: int
    weight: float
    entry: Entry | None


class LayerRead(NamedTuple):
    """A memory layer's gate and slots for a token of the answer; slots by decreasing weight."""

    gate: float
    slots: list[SlotRead]


class TracingReader:
    """Wraps a `StreamReader` for the needle protocol and logs its writes and reads."""

    def __init__(self, reader: StreamReader, rule: AbstractChunkRule):
        """Wraps `reader`; `rule` is the rule of its memories, which have slots."""
        self._reader, self._rule = reader, rule
        self._tokens = array.array("i")
        self.reset_memory()

    @property
    def tokens(self) -> np.ndarray:
        """All tokens read, in order."""
        return np.array(self._tokens, np.int32)

    def reset_memory(self) -> None:
        """Resets the reader's memory and the logs."""
        self._reader.reset_memory()
        slots = self._rule.num_slots
        assert slots is not None, "only a memory of slots is traced"
        self.logs = {layer: SlotLog(slots) for layer in self._reader.stream.memory}
        self.num_writes = 0
        self.reads: list[dict[str, LayerRead]] = []

    def restart(self) -> None:
        """Restarts the reader and clears the recorded reads."""
        self._reader.restart()
        self.reads = []

    def read(self, tokens: np.ndarray) -> None:
        """Reads `[length]` token ids with the reader."""
        self._tokens.extend(tokens.tolist())
        self._reader.read(tokens)

    def write(self) -> None:
        """Logs which slots the waiting pairs go to, then writes them."""
        stream = self._reader.stream
        for layer, log in self.logs.items():
            pending, memory = stream.layers[layer].pending, stream.memory[layer]
            assert pending is not None, "a stream of a memory layer carries its queue"
            num_waiting = int(np.max(pending.num_waiting))
            complete = max(0, num_waiting - self._rule.lookahead)
            ids, scores = _address(memory, pending.tokens.query, rule=self._rule)
            log.add(
                np.asarray(ids)[:complete],
                np.asarray(scores)[:complete],
                first_position=len(self._tokens) - num_waiting,
                write=self.num_writes,
            )
        self.num_writes += 1
        self._reader.write()

    def next_token(self) -> int:
        """The reader's next token; records the slots that the memories read to choose it."""
        reads = {}
        gates, access = self._reader.last_read()
        for layer, gate in gates.items():
            weights = np.asarray(access[layer].slot_weights)
            slots = []
            for place in np.argsort(-weights, kind="stable"):
                slot = int(np.asarray(access[layer].slot_ids)[place])
                entry = self.logs[layer].entry(
                    slot, self._tokens, lookahead=self._rule.lookahead, num_writes=self.num_writes
                )
                slots.append(SlotRead(slot, float(weights[place]), entry))
            reads[layer] = LayerRead(float(gate), slots)
        self.reads.append(reads)
        return self._reader.next_token()


@partial(jax.jit, static_argnames="rule")
def _address(
    memory: Memory, queries: jax.Array, *, rule: AbstractChunkRule
) -> tuple[jax.Array, jax.Array]:
    """Slots and scores `[tokens, places]` of the queued queries of one sequence of one group."""
    return rule.address(map_unshared(lambda x: x[0], memory), queries[0, 0])
