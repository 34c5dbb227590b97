"""The contract of a memory rule: what a memory declares, and what its callers may rely on.

A rule is a frozen dataclass: its fields are its configuration, and its memory is a pytree of
arrays that it does not keep. All methods are pure and safe under jit, grad, vmap and scan. A memory
belongs to one group of sequences; `core.chunks.map_groups` runs several side by side.

A rule declares in its own file everything that layers, decoder, mesh, streams and evaluations need.

Required:
  key_dim, value_dim: widths of queries and of values; `num_heads` queries per token (default 1).
  init(rng): the memory before the first token.
  step(memory, chunk): reads and writes one chunk. This is the definition of the rule.
  read(memory, query): for a memory layer (`AbstractChunkRule`): what tokens read, without a write.
  tiny(): a small instance, which `check_rule` and the tests use.

With defaults that a rule may override:
  lookahead: distance from a token to the token that holds its target; 0.
  memory_shapes: shapes and dtypes of the memory; the default traces `init`.
  targets(value), chunk(...), sequence(...): how tokens become chunks. A rule that
    needs more about each token than `core.chunks.Chunk` holds returns a NamedTuple of its own from
    `chunk`, with the fields of `Chunk` first, and may take further arguments in `sequence`.
  run(memory, sequence, chunk_size): whole sequences; the default scans `step`.
  run_groups: the same for several memories.
  supports_sharding, memory_specs(memory): whether and how devices share one memory; by default
    they do not.
  num_slots, address(memory, query): for a memory of slots. Its `access` has the fields `slot_ids`
    and `slot_weights`, its memory the field `values`: of zeros, reads are zeros.
  write(memory, chunk), write_blocks(memory, blocks): writes without reads, for streams.
  overlay(memory, base): memories that share a base, for a rule that writes few of its numbers.
  inactive_parameters: fast weights that one token does not use, for counts of active parameters.
  long_writes: whether a write may take a whole text as its chunk.
  reads_own_writes: whether each token is written at once and reads after its own write.

What a step reports is a NamedTuple of scalars, the rule's own `Info`. The names of its fields
become names of metrics. A class attribute `logged` of the Info, a tuple of field names, limits the
training log to cheap measures; measures that are not used cost no time.
"""

import abc
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, TokenMask, TokenValues
from fwpkm_jax.core.checks import check_arrays, check_tree
from fwpkm_jax.core.chunks import (
    AnyChunk,
    Chunk,
    ChunkSizeTag,
    Memory,
    RunOutput,
    StepOutput,
    map_groups,
    scan_chunks,
)
from fwpkm_jax.core.slots.options.blocks import ChunkBlocks, write_whole
from fwpkm_jax.core.slots.options.devices import MemoryAxes
from fwpkm_jax.core.targets import Pairing, shift_left, write_weights


class AbstractRule(abc.ABC):
    """How a memory reads and writes; see the module's docstring."""

    registry: ClassVar[str] = "fwpkm_jax.rules.registry"
    """The module whose `load_all` imports every rule of this package."""
    __dataclass_fields__: ClassVar[dict[str, Any]]  # Of each rule; `dataclasses.replace` asks.
    key_dim: int
    value_dim: int
    num_heads: int = 1
    lookahead: int = 0

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> Memory:
        """Fast weights before the first token, float32."""

    @functools.cached_property
    def memory_shapes(self) -> Any:
        """Shapes and dtypes of the memory: those of `init`, without allocating it."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    @abc.abstractmethod
    def step(self, memory: Memory, chunk: AnyChunk) -> StepOutput:
        """Reads and writes one chunk, leaves `[tokens, ...]`. This defines the rule."""

    def targets(
        self, value: Float[Array, "batch length value"]
    ) -> Float[Array, "batch length value"]:
        """What each token should read, given the values of all tokens.

        Zeros where the token that would hold the target lies behind the end.
        """
        return shift_left(value, self.lookahead)

    def chunk(self, query: jax.Array, target: jax.Array, weights: Any) -> AnyChunk:
        """What `step` and `run` take, with any leading axes.

        Args:
          query: `[..., heads, key]`.
          target: `[..., value]`.
          weights: `core.targets.WriteWeights`, leaves `[...]`.
        """
        return Chunk(query, target, *weights)

    def sequence(
        self,
        query: Float[Array, "batch length heads key"],
        value: Float[Array, "batch length value"],
        *,
        gate: Float[Array, "batch length"] | None = None,
        mask: TokenMask | None = None,
        chunk_size: int,
        pairing: Pairing = write_weights,
    ) -> AnyChunk:
        """What `run` takes: queries paired with the values `lookahead` tokens further on.

        Args:
          query: what each token reads and writes under.
          value: what the token `lookahead` before should have read.
          gate: weight of each token's loss; None: 1.
          mask: 1 for real tokens, 0 for padding; None: all real.
          chunk_size: tokens between two writes; pairs do not cross the ends of chunks.
          pairing: makes the weights; the default is the paper's.

        Raises:
          ValueError: an array has the wrong rank, width, length or dtype.
        """
        # The public door: what follows takes these arrays as right.
        check_arrays(
            query=(query, "float batch length heads key"),
            value=(value, "float batch length value"),
            gate=(gate, "float batch length"),
            mask=(mask, "mask batch length"),
            sizes={"heads": self.num_heads, "key": self.key_dim, "value": self.value_dim},
        )
        gate = jnp.ones(value.shape[:2], value.dtype) if gate is None else gate
        weights = pairing(gate, mask, chunk_size=chunk_size, lookahead=self.lookahead)
        sequence: Any = self.chunk(query, self.targets(value), weights)
        return (
            sequence._replace(cut=ChunkSizeTag(chunk_size))
            if "cut" in sequence._fields
            else sequence
        )

    def run(self, memory: Memory, sequence: AnyChunk, *, chunk_size: int) -> RunOutput:
        """Reads and writes whole sequences, leaves `[batch, length, ...]`.

        A rule with a faster pass or a backward pass of its own overrides this. Its outputs and
        gradients must equal those of the default.

        Raises:
          ValueError: memory or sequence do not fit the rule, or `chunk_size` is not the one that
            the sequence was made for.
        """
        check_run(self, memory, sequence)
        return scan_chunks(self.step, memory, sequence, chunk_size=chunk_size)

    @property
    def supports_sharding(self) -> bool:
        """Whether several devices can share a memory: `run_groups` then takes `axes`."""
        return False

    @property
    def keeps_bfloat16_queries(self) -> bool:
        """Whether `run_groups` takes queries in bfloat16 beside other signals in float32.

        A layer then leaves queries so that it projects in bfloat16 and does not normalise; the
        results are those of the same queries in float32.
        """
        return False

    def run_groups(
        self,
        memory: Memory,
        sequence: AnyChunk,
        *,
        chunk_size: int,
        axes: MemoryAxes | None = None,
    ) -> RunOutput:
        """`run` for several memories side by side, every leaf with a leading axis of groups.

        Args:
          memory: leaves `[groups, ...]`; with `axes`, this device's part of them.
          sequence: leaves `[groups, batch, length, ...]`; with `axes`, this device's part of them.
          chunk_size: tokens of a sequence between two writes.
          axes: inside `jax.shard_map`, how devices share each memory; None: they do not.

        Raises:
          ValueError: `axes` for a rule that does not split.
        """
        if axes is not None:
            raise ValueError(f"{self} cannot be split over devices; use mesh.memory=independent.")
        # Each memory has its own sequences, so nothing passes between groups.
        return map_groups(
            lambda memory, part: self.run(memory, part, chunk_size=chunk_size), memory, sequence
        )

    def memory_specs(
        self, memory: Any, *, group_axes: tuple[str, ...], axes: MemoryAxes | None
    ) -> Any:
        """How a memory's arrays are distributed over devices: one `PartitionSpec` for each leaf.

        Args:
          memory: arrays or their shapes, leaves `[groups, ...]`.
          group_axes: mesh axes along which devices hold different memories.
          axes: how devices share each memory; None for a rule that does not split.

        Raises:
          ValueError: `axes` for a rule that does not split.
        """
        if axes is not None:
            raise ValueError(f"{self} cannot be split over devices; use mesh.memory=independent.")
        spec: Any = PartitionSpec(group_axes)
        return jax.tree.map(lambda _: spec, memory)

    @property
    def num_slots(self) -> int | None:
        """Slots of the memory; None for a memory without slots."""
        return None

    @property
    def inactive_parameters(self) -> int:
        """How many numbers of the memory a single token does not use."""
        return 0


class AbstractChunkRule(AbstractRule):
    """A rule that can be read without a write, and streamed token by token (`core.streams`).

    Its reads depend only on the memory that earlier chunks left, unless it `reads_own_writes`. A
    memory layer (`layers.memories.fast_weight`) accepts only such rules.
    """

    reads_own_writes: bool = False
    """Whether tokens write one after the other and each reads right after its own write, so that
    chunks make no difference. Streams then write every token at once, and none waits; `lookahead`
    is 0; each memory has one sequence; and `run_groups` takes `documents`, a `NewDocuments` of
    `core.streams.pending`, where documents start anew, or None."""

    learned_start: bool = False
    """Whether a layer learns the field `values` of the memory that sequences start from, as a
    weight. `init` makes the other fields."""

    long_writes: bool = True
    """Whether one write may take a whole text as its chunk. False where such a step can diverge;
    evaluations then keep the configured chunk size."""

    @abc.abstractmethod
    def read(self, memory: Memory, query: Queries) -> tuple[TokenValues, Any]:
        """Reads `[tokens, heads, key]`: output `[tokens, value]` and per-token access."""

    def address(self, memory: Memory, query: Queries) -> tuple[jax.Array, jax.Array]:
        """The slots that each query finds and their scores, `[tokens, places]` both.

        Only for a memory of slots. The default returns the weights of the reads as scores.
        """
        _, access = self.read(memory, query)
        return access.slot_ids, access.slot_weights

    def begin_map(self, kernel: Float[Array, "model heads key"]) -> jax.Array:
        """A layer's map to queries before training, of the one that it has drawn."""
        return kernel

    def write(self, memory: Memory, chunk: AnyChunk) -> Memory:
        """The memory after one chunk: that of `step`, without the reads."""
        return self.step(memory, chunk).memory

    def write_blocks(self, memory: Memory, blocks: ChunkBlocks) -> Memory:
        """`write` of a chunk too long to be formed at once, equal to it up to the order of sums.

        Without any block the memory is unchanged.

        The default forms the whole chunk. A rule overrides this to write long texts in bounded
        memory.
        """
        return write_whole(self.write, memory, blocks)

    def convert_memory(self, memory: Memory) -> Memory:
        """Memories that a rule of the same sizes has written, as this one keeps them.

        What a rule keeps beside its fast weights begins anew.

        Args:
          memory: leaves `[groups, ...]`.

        Raises:
          ValueError: the memory is not of this rule's sizes.
        """
        check_memory(self, memory, groups=True)
        return memory

    def overlay(self, memory: Memory, base: Memory, *, capacity: int) -> Memory:
        """Memories that share with `base` all that they have in common (see `options.overlay`).

        Args:
          memory: leaves `[groups, ...]`.
          base: one memory, leaves `[1, ...]`.
          capacity: slots of each group that may differ from the base.

        Raises:
          ValueError: a rule whose writes change the whole memory, as by default.
        """
        raise ValueError(
            f"{type(self).__name__} has no overlay: a write changes all of its memory; use a "
            "private memory for each user."
        )


def check_memory(rule: Any, memory: Memory, *, groups: bool = False) -> None:
    """Raises a ValueError unless the memory has the shapes of `rule.init`.

    Args:
      memory: one memory, or with `groups` several, leaves `[groups, ...]`.
      groups: whether there is a leading axis of groups.
    """
    check_tree("memory", memory, rule.memory_shapes, leading=("groups",) if groups else ())


def check_query(rule: Any, query: jax.Array) -> None:
    """Raises a ValueError unless the queries are `[tokens, heads, key]` as the rule reads them."""
    sizes = {"heads": rule.num_heads, "key": rule.key_dim}
    check_arrays(query=(query, "float tokens heads key"), sizes=sizes)


def check_run(rule: Any, memory: Memory, sequence: AnyChunk) -> None:
    """Raises a ValueError unless one memory and one sequence fit the rule and each other."""
    check_memory(rule, memory)
    names = {
        "sequence.query": (sequence.query, "float batch length heads key"),
        "sequence.target": (sequence.target, "float batch length value"),
        "sequence.write_weight": (sequence.write_weight, "float batch length"),
    }
    sizes = {"heads": rule.num_heads, "key": rule.key_dim, "value": rule.value_dim}
    check_arrays(sizes=sizes, **names)
