"""The interface of a memory rule: how a memory reads and writes one chunk."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, TokenValues
from fwpkm_jax.core.chunks import Chunk, Memory, RunOutput, StepOutput, map_groups, scan_chunks
from fwpkm_jax.core.slots.block_write import ChunkBlocks, write_whole
from fwpkm_jax.core.slots.shared_table import MemoryAxes
from fwpkm_jax.core.targets import Pairing, shift_left, write_weights


class AbstractRule(abc.ABC):
    """How a memory reads and writes.

    A rule is a frozen dataclass: its fields are its configuration, its memory is a pytree that it
    does not keep. All methods are pure and safe under jit, grad, vmap and scan. A memory belongs
    to one group; `core.chunks.map_groups` keeps several side by side.
    """

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> Memory:
        """Fast weights before the first token, float32."""

    @abc.abstractmethod
    def step(self, memory: Memory, chunk: Chunk) -> StepOutput:
        """Reads and writes one chunk, leaves `[tokens, ...]`. This defines the rule."""

    def run(self, memory: Memory, sequence: Chunk, *, chunk_size: int) -> RunOutput:
        """Reads and writes whole sequences, leaves `[batch, length, ...]`.

        A rule with a backward pass of its own overrides this, equal to the default in outputs and
        gradients.
        """
        return scan_chunks(self.step, memory, sequence, chunk_size=chunk_size)

    @property
    def splits(self) -> bool:
        """Whether several devices can share a memory: `run_groups` then takes `axes`."""
        return False

    def run_groups(
        self,
        memory: Memory,
        sequence: Chunk,
        *,
        chunk_size: int,
        axes: MemoryAxes | None = None,
    ) -> RunOutput:
        """`run` for several memories side by side, every leaf with a leading axis of groups.

        Args:
          memory: leaves `[groups, ...]`; a device's part of them where `axes` says so.
          sequence: leaves `[groups, batch, length, ...]`, a device's part likewise.
          chunk_size: tokens of a sequence between two writes.
          axes: inside `jax.shard_map`, how devices share each memory; None: they do not.

        Raises:
          ValueError: `axes` for a rule that does not split.
        """
        if axes is not None:
            raise ValueError(f"{self} cannot be split over devices; use mesh.memory=independent.")
        return map_groups(
            lambda memory, part: self.run(memory, part, chunk_size=chunk_size), memory, sequence
        )

    @classmethod
    @abc.abstractmethod
    def tiny(cls) -> "AbstractRule":
        """The smallest instance that exercises every branch, for tests."""


class AbstractChunkRule(AbstractRule):
    """A rule whose reads depend on the memory left by earlier chunks alone.

    Such a memory can be read without being written, and streamed token by token
    (`core.streams.streaming`).
    """

    lookahead: int

    @abc.abstractmethod
    def read(self, memory: Memory, query: Queries) -> tuple[TokenValues, Any]:
        """Reads `[tokens, heads, key]`: output `[tokens, value]` and per-token access."""

    def sequence(
        self,
        query: Float[Array, "batch length heads key"],
        value: Float[Array, "batch length value"],
        *,
        gate: Float[Array, "batch length"] | None = None,
        mask: Float[Array, "batch length"] | None = None,
        chunk_size: int,
        pairing: Pairing = write_weights,
    ) -> Chunk:
        """What `run` takes: queries paired with the values `lookahead` tokens further on.

        Args:
          query: what each token reads and writes under.
          value: what the token `lookahead` before should have read.
          gate: weight of each token's loss; None: 1.
          mask: 1 for real tokens, 0 for padding; None: all real.
          chunk_size: tokens between two writes; pairs do not cross the ends of chunks.
          pairing: makes the weights; the default is the paper's.
        """
        gate = jnp.ones(value.shape[:2], value.dtype) if gate is None else gate
        weights = pairing(gate, mask, chunk_size=chunk_size, lookahead=self.lookahead)
        return Chunk(query, self.targets(value), *weights)

    def targets(
        self, value: Float[Array, "batch length value"]
    ) -> Float[Array, "batch length value"]:
        """What each token should read, given all values; of no use where a pair is not complete."""
        return shift_left(value, self.lookahead)

    def write(self, memory: Memory, chunk: Chunk) -> Memory:
        """The memory after one chunk; what `step` leaves, without the reads."""
        return self.step(memory, chunk).memory

    def write_blocks(self, memory: Memory, blocks: ChunkBlocks) -> Memory:
        """`write` of a chunk too long to be formed at once, equal to it up to the order of sums.

        Without any block the memory stays as it is.

        The default forms it; a rule that is to read long texts in bounded memory overrides this.
        """
        return write_whole(self.write, memory, blocks)
