"""A fast-weight memory as a layer: projections, gate, any chunk rule.

A memory layer is called as `layer(x, memory, *, mask, starts, write, pairing, partition)` and
returns its output, the memory and a record. It does not add the residual: the block that holds it
does.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.added_fields import meant_before
from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.chunks import (
    AnyChunk,
    Memory,
    RunOutput,
    merge_groups,
    shares,
    split_groups,
)
from fwpkm_jax.core.normalize import l2_normalize
from fwpkm_jax.core.padding import pack_tokens
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.slots.measures import AccessMeasures, access_counts, measures_of_counts
from fwpkm_jax.core.streams import streaming
from fwpkm_jax.core.streams.flush import flush
from fwpkm_jax.core.streams.queue import ChunkSize, Pending, init_pending
from fwpkm_jax.core.streams.streaming import Signals
from fwpkm_jax.core.targets import (
    Pairing,
    shift_left,
    standardize,
    write_weights,
)
from fwpkm_jax.layers.memories.documents import run_documents, within_documents
from fwpkm_jax.layers.memories.parts import run_parts
from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.layers.partition import BATCH, ParameterAxes, Partition
from fwpkm_jax.literals import check_literals
from fwpkm_jax.rules import DEFAULT_RULE, AbstractChunkRule, make_rule
from fwpkm_jax.rules.arguments import check_memory

Normalizer = Literal["none", "standardize", "l2"]
DocumentMemory = Literal["carry", "document"]
"""What a memory makes of rows of several documents, see `FastWeightConfig.documents`."""

_NORMALIZERS = {"none": lambda x: x, "standardize": standardize, "l2": l2_normalize}
_GATE_WIDTH = 8  # The gate is the sigmoid of a mean over this many projections.


@dataclass(frozen=True, kw_only=True)
class FastWeightConfig:
    """A memory block before the token mixer.

    Example:
      >>> from fwpkm_jax import FastWeightConfig, FwMLP
      >>> config = FastWeightConfig(rule=FwMLP(), chunk_size=64)
      >>> config.rule.learning_rate, config.chunk_size
      (0.1, 64)
    """

    rule: AbstractChunkRule = field(default_factory=functools.partial(make_rule, DEFAULT_RULE))
    """The memory and how it is written. The name of a registered rule stands for its defaults."""
    chunk_size: int = 512
    """Tokens of a sequence between two writes."""
    query_norm: Normalizer = "none"
    """Normalisation of each half of the projected query."""
    value_norm: Normalizer = "standardize"
    """Normalisation of the projected value over its features."""
    weight_by_gate: bool = True
    """Weights each token's memory loss by its gate."""
    gate_output: bool = True
    """Mixes read and value by the gate; off: adds them."""
    documents: DocumentMemory = "carry"
    """Of rows that hold several documents. carry: the memory goes on from one to the next, and only
    pairs end with a document. document: each document starts from the memory that is passed in and
    counts chunks from its first token; for a memory per sequence."""
    unused_gate: bool = field(default=False, metadata=meant_before(True))
    """Keeps the gate's projection if neither option above uses it, as older runs have it. Off: a
    layer without a use for the gate has no projection, and its gate is 1."""

    @property
    def has_gate(self) -> bool:
        """Whether a layer projects a gate."""
        return self.weight_by_gate or self.gate_output or self.unused_gate

    def __post_init__(self):
        check_literals(self)
        if isinstance(self.rule, str):
            object.__setattr__(self, "rule", make_rule(self.rule))
        if not isinstance(self.rule, AbstractChunkRule):
            raise ValueError(
                f"rule={self.rule!r} is no AbstractChunkRule; a memory layer reads before it "
                "writes."
            )
        if self.chunk_size <= self.rule.lookahead:
            raise ValueError(
                f"chunk_size={self.chunk_size} must exceed rule.lookahead={self.rule.lookahead}, "
                "or nothing is ever written."
            )


class FastWeightInfo(NamedTuple):
    """What a memory layer did in one call.

    Attributes:
      memory_loss: mean over the paired tokens of gate-weighted mean squared error, before each
        chunk's write.
      token_loss: gate-weighted mean squared error of each token's read, 0 where it has no target.
      gate: share of the read in the output, 0 to 1.
      write: what the rule reports of its writes, its own NamedTuple, each field the mean over
        groups and chunks; None for a call that wrote by no chunk of the config's size: a frozen
        memory or a piece of a stream.
      access: what the rule reports of each token's read, leaves `[batch, length, ...]`, or None. A
        memory of slots has the fields `slot_ids` and `slot_weights`, `[batch, length, places]`.
      measures: how evenly this call used the slots; None for a memory without slots. O(slots) to
        compute, free when unused in jit.
    """

    memory_loss: Float[Array, ""]
    token_loss: Float[Array, "batch length"]
    gate: Float[Array, "batch length"]
    write: Any
    access: Any
    measures: AccessMeasures | None


class FastWeight(nnx.Module):
    """Reads and writes a memory with learned queries, targets and gate (spec: section 1).

    The memory comes in and goes out as an argument with a leading axis of groups; sequences of one
    group share a memory, neighbours in the batch first.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from fwpkm_jax import FastWeight, FastWeightConfig, FwPKM
      >>> rule = FwPKM(num_subkeys=8, key_dim=8, value_dim=8, top_k=2)
      >>> layer = FastWeight(FastWeightConfig(rule=rule, chunk_size=4), 16, rngs=nnx.Rngs(0))
      >>> memory = jax.vmap(rule.init)(jax.random.split(jax.random.key(1), 2))  # Two groups.
      >>> x = jax.random.normal(jax.random.key(2), (2, 12, 16))  # [batch, length, model]
      >>> y, memory, info = nnx.jit(layer)(x, memory)
      >>> (x + y).shape  # The layer returns what is added to the residual stream.
      (2, 12, 16)
    """

    # All devices of a sequence find its slots.
    parameter_axes: ClassVar[ParameterAxes] = {
        "(query|value|gate)_proj/kernel": ("embed", None),
        "out_proj/kernel": (None, "embed"),
        r"\w+_proj/bias": (None,),
    }

    def __init__(
        self,
        config: FastWeightConfig,
        model_dim: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        """Builds the projections.

        Args:
          config: of the block.
          model_dim: width of the residual stream.
          norm_eps: of the RMS norms.
          init_std: of the linear maps' initial weights.
          dtype: of the activations; None follows the input.
          rngs: for the initial weights.
        """
        rule = config.rule
        self.config = config

        def linear(features_in: int, features_out: int) -> nnx.Linear:
            init = nnx.initializers.normal(init_std)
            return nnx.Linear(features_in, features_out, dtype=dtype, kernel_init=init, rngs=rngs)

        def norm(features: int) -> RMSNorm:
            return RMSNorm(features, eps=norm_eps)

        self.query_norm = norm(model_dim)
        self.query_proj = linear(model_dim, rule.num_heads * rule.key_dim)
        self.value_norm = norm(model_dim)
        self.value_proj = linear(model_dim, rule.value_dim)
        # Drawn in any case, so that later weights are the same with and without a gate.
        gate = norm(model_dim), linear(model_dim, _GATE_WIDTH)
        self.gate_norm, self.gate_proj = gate if config.has_gate else (None, None)
        self.out_norm = norm(rule.value_dim)
        self.out_proj = linear(rule.value_dim, model_dim)

    def init_memory(self, rng: jax.Array, *, groups: int = 1) -> Memory:
        """Fast weights before the first token, leaves `[groups, ...]`, every group the same."""
        if groups < 1:
            raise ValueError(f"groups={groups} must be at least 1; 1 is one memory for all.")
        memory = self.config.rule.init(rng)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (groups, *x.shape)), memory)

    def signals(
        self, x: Float[Array, "batch length model"], mask: Float[Array, "batch length"] | None
    ) -> Signals:
        """The inputs of the memory for each token, in at least float32."""
        rule = self.config.rule
        memory_dtype = jnp.promote_types(x.dtype, jnp.float32)
        query = self.query_proj(self.query_norm(x)).astype(memory_dtype)
        # The halves of the whole query, all heads together, as in the authors' release.
        halves = query.reshape(*query.shape[:-1], 2, -1)
        query = _NORMALIZERS[self.config.query_norm](halves)
        query = query.reshape(*x.shape[:2], rule.num_heads, rule.key_dim)
        value = self.value_proj(self.value_norm(x)).astype(memory_dtype)
        value = _NORMALIZERS[self.config.value_norm](value)
        gate = jnp.ones(x.shape[:2], memory_dtype)
        if self.gate_proj is not None and self.gate_norm is not None:
            gate = self.gate_proj(self.gate_norm(x)).astype(memory_dtype)
            gate = jax.nn.sigmoid(jnp.mean(gate, axis=-1))
        real = jnp.ones_like(gate) if mask is None else mask.astype(memory_dtype)
        return Signals(query, value, gate, real)

    def merge(
        self, read: Float[Array, "batch length value"], signals: Signals, *, dtype: DTypeLike
    ) -> Float[Array, "batch length model"]:
        """The layer's output in `dtype`, from what the tokens read."""
        gate = signals.gate[..., None]
        if self.config.gate_output:
            mixed = gate * read + (1.0 - gate) * signals.value
        else:
            mixed = read + signals.value
        return self.out_proj(self.out_norm(mixed).astype(dtype)).astype(dtype)

    def __call__(
        self,
        x: Float[Array, "batch length model"],
        memory: Memory,
        *,
        mask: Float[Array, "batch length"] | None = None,
        starts: Bool[Array, "batch length"] | None = None,
        write: bool = True,
        pairing: Pairing = write_weights,
        partition: Partition | None = None,
    ) -> tuple[Float[Array, "batch length model"], Memory, FastWeightInfo]:
        """Reads and writes whole sequences, a chunk at a time.

        Args:
          x: the residual stream, which the layer norms itself.
          memory: fast weights, leaves `[groups, ...]`, the batch divisible by groups.
          mask: 1 for real tokens, 0 for padding, which neither writes nor counts.
          starts: true at the first token of each document, from
            `core.documents.document_starts(segment_ids)`: no token is paired with a value of
            another document, and `config.documents` says whether the memory goes on. None: a
            sequence is one.
          write: False reads with the memory that is passed in and writes nothing.
          pairing: makes the write weights from gate and mask.
          partition: of the work and the memories over devices; what is partitioned is written.

        Returns:
          What the block adds to the residual stream, the memory after the last write, and what
          happened. With `starts` and `documents="document"` the memory is that of each sequence's
          last document, and the record has no measures of writes.

        Raises:
          ValueError: an argument does not fit the layer; or `documents="document"` with a memory
            of several sequences, or of several devices.
        """
        config, rule = self.config, self.config.rule
        self._check(x, mask, memory)
        check_arrays(x=(x, "float batch length model"), starts=(starts, "mask batch length"))
        signals = self.signals(x, mask)
        loss_gate = signals.gate if config.weight_by_gate else jnp.ones_like(signals.gate)
        if starts is not None and config.documents == "document" and write:
            self._check_own_memory(memory, len(x), partition)
            run = functools.partial(
                run_documents, rule, chunk_size=config.chunk_size, pairing=pairing
            )
            if partition is not None:  # Each device has its sequences' memories.
                run = partition.run(run, in_specs=P(BATCH), out_specs=P(BATCH))
            weighed = signals._replace(gate=loss_gate)
            out = run(memory, weighed, starts.astype(bool), mask)
            facts = _facts(rule, signals, out.losses, out.paired, out.access, None, partition)
            return self.merge(out.read, signals, dtype=x.dtype), out.memory, facts
        sequence = rule.sequence(
            signals.query,
            signals.value,
            gate=loss_gate,
            mask=mask,
            chunk_size=config.chunk_size,
            pairing=pairing,
        )
        if starts is not None:
            sequence = within_documents(sequence, starts, lookahead=rule.lookahead)
        groups = jax.tree.leaves(memory)[0].shape[0]
        split = split_groups if partition is None else partition.split_groups
        merge = merge_groups if partition is None else partition.merge_groups
        grouped = jax.tree.map(lambda leaf: split(leaf, groups), sequence)
        if partition is not None:
            memory, read, access, info = self._run_partitioned(memory, grouped, partition)
        elif write:
            memory, read, access, info = rule.run_groups(
                memory, grouped, chunk_size=config.chunk_size
            )
        else:
            read, access = streaming.read_sequences(rule.read, memory, grouped.query)
            info = None
        read, access = jax.tree.map(merge, (read, access))
        losses = sequence.write_weight * jnp.mean((read - sequence.target) ** 2, axis=-1)
        facts = _facts(rule, signals, losses, sequence.paired, access, info, partition)
        return self.merge(read, signals, dtype=x.dtype), memory, facts

    def _run_partitioned(
        self, memory: Memory, grouped: AnyChunk, partition: Partition
    ) -> RunOutput:
        """`run_groups` with each device's sequences and its part of the memories."""
        rule, chunk_size = self.config.rule, self.config.chunk_size
        if shares(memory):
            raise ValueError(
                "memory is an overlay, which runs on one device; set all sizes of the mesh to 1, "
                "or make it private (overlays.to_private)."
            )
        axes, sequence = partition.axes_of(rule), partition.sequence
        memory_specs = partition.memory_specs(rule, memory)
        groups, members, length = grouped.write_weight.shape[:3]
        partition.check_groups(groups, members)
        if sequence is not None:
            self._check_parts(length, sequence)
        along = None if sequence is None else sequence.name
        among = () if axes is None else tuple(axis for axis in axes.tokens if axis != along)
        tokens = P(partition.group_axes, among, along)
        columns = () if axes is None else axes.target_columns
        values: Any = P(partition.group_axes, among, along, columns)
        sequence_specs = jax.tree.map(lambda _: tokens, grouped)._replace(target=values)
        chunks = P(partition.group_axes, along if axes is None else None)
        run = functools.partial(run_parts, rule, chunk_size=chunk_size, axes=axes, along=sequence)
        return partition.run(
            run,
            in_specs=(memory_specs, sequence_specs),
            out_specs=RunOutput(memory_specs, values, tokens, chunks),
        )(memory, grouped)

    def _check_parts(self, length: int, sequence: SequenceAxis) -> None:
        size, splits = self.config.chunk_size, self.config.rule.splits
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

    def init_pending(self, batch: int, groups: int, *, max_chunk_size: int, dtype: Any) -> Pending:
        """An empty queue for `stream`, leaves `[groups, batch // groups, capacity, ...]`."""
        rule = self.config.rule
        one = Signals(
            jnp.zeros((batch, 1, rule.num_heads, rule.key_dim), dtype),
            jnp.zeros((batch, 1, rule.value_dim), dtype),
            jnp.zeros((batch, 1), dtype),
            jnp.zeros((batch, 1), dtype),
        )
        one = jax.tree.map(lambda x: split_groups(x, groups), one)
        return init_pending(one, max_chunk_size + rule.lookahead)

    def stream(
        self,
        x: Float[Array, "batch length model"],
        memory: Memory,
        pending: Pending,
        *,
        mask: Float[Array, "batch length"] | None = None,
        numbers: Int[Array, "batch length"] | None = None,
        chunk_size: ChunkSize | None = None,
        write: bool = True,
    ) -> tuple[Float[Array, "batch length model"], Memory, Pending, FastWeightInfo]:
        """Reads a piece of a stream and writes the chunks that it completes.

        Args:
          x: the residual stream.
          memory: fast weights, leaves `[groups, ...]`.
          pending: from `init_pending` or the last call.
          mask: 1 for real tokens. A position where all sequences of a group have padding takes no
            place in the group's queue. Where some have a token, the padding of the others is
            queued too, so that the sequences that share a memory stay aligned.
          numbers: of each token's document, from 1, counted along the stream: no token is paired
            with a value of another, and the memory goes on. None: all are of document 1.
          chunk_size: tokens per write for this call; None: the config's. "flush": nothing is
            written before `flush` is called, and the queue must have room until then.
          write: False reads with the memory that is passed in; no token is queued or written.

        Raises:
          ValueError: an argument does not fit the layer, or `numbers` come with
            `documents="document"`.
        """
        rule = self.config.rule
        chunk_size = self.config.chunk_size if chunk_size is None else chunk_size
        self._check(x, mask, memory, pending)
        signals = self.signals(x, mask)
        groups = jax.tree.leaves(memory)[0].shape[0]
        loss_gate = signals.gate if self.config.weight_by_gate else jnp.ones_like(signals.gate)
        queued = signals._replace(gate=loss_gate)
        paired = signals.mask * shift_left(signals.mask, rule.lookahead)
        if numbers is not None:
            if self.config.documents == "document":
                raise ValueError(
                    "documents='document' takes no documents within a stream; start each with "
                    "its own stream, or use documents='carry'."
                )
            numbers = numbers.astype(signals.mask.dtype)
            queued = queued._replace(mask=signals.mask * numbers)
            paired *= (numbers == shift_left(numbers, rule.lookahead)).astype(paired.dtype)
        queued = jax.tree.map(lambda leaf: split_groups(leaf, groups), queued)
        if write:
            packing = None if mask is None else pack_tokens(jnp.any(queued.mask != 0, axis=1))
            if packing is not None:
                queued = _reorder(queued, packing.order)
            num_real = None if packing is None else packing.counts

            memory, pending, read, access = streaming.push(
                *(rule.read, rule.write, memory, pending, queued),
                chunk_size=chunk_size,
                lookahead=rule.lookahead,
                targets=rule.targets,
                make_chunk=rule.chunk,
                num_real=num_real,
            )
            if packing is not None:
                read, access = _reorder((read, access), packing.places)
        else:
            read, access = streaming.read_sequences(rule.read, memory, queued.query)
        read, access = jax.tree.map(merge_groups, (read, access))
        target = rule.targets(signals.value)
        # A pair counts in the losses of the call that brings both of its tokens.
        losses = loss_gate * paired * jnp.mean((read - target) ** 2, axis=-1)
        facts = _facts(rule, signals, losses, paired, access, None)
        return self.merge(read, signals, dtype=x.dtype), memory, pending, facts

    def flush(self, memory: Memory, pending: Pending) -> tuple[Memory, Pending]:
        """Writes the complete waiting pairs now; see `core.streams.flush.flush`."""
        rule = self.config.rule
        check_memory(rule, memory, groups=True)
        self._check_pending(pending, memory)
        return flush(
            rule.write_blocks,
            memory,
            pending,
            lookahead=rule.lookahead,
            targets=rule.targets,
            make_chunk=rule.chunk,
        )

    def _check_own_memory(self, memory: Memory, batch: int, partition: Partition | None) -> None:
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
                "(memory.groups), or use documents='carry'."
            )
        if partition is None:
            return
        partition.check_whole_sequences("a memory with documents='document'")
        axes = partition.axes_of(self.config.rule)
        if axes is not None and (axes.tokens or axes.columns or axes.slots):
            raise ValueError(
                "documents='document' needs each memory whole on one device; set mesh.model=1 and "
                "mesh.memory=independent, or use documents='carry'."
            )
        partition.check_groups(groups, 1)

    def _check(self, x: Any, mask: Any, memory: Memory, pending: Pending | None = None) -> None:
        """Raises a ValueError that names the argument which does not fit the layer."""
        sizes = check_arrays(
            x=(x, "float batch length model"),
            mask=(mask, "mask batch length"),
            sizes={"model": self.query_proj.in_features},
        )
        check_memory(self.config.rule, memory, groups=True)
        if pending is not None:
            self._check_pending(pending, memory, batch=sizes["batch"])

    def _check_pending(self, pending: Pending, memory: Memory, batch: int | None = None) -> None:
        groups = jax.tree.leaves(memory)[0].shape[0]
        sizes = {"groups": groups}
        if batch is not None and batch % groups == 0:  # Otherwise `split_groups` refuses the batch.
            sizes["members"] = batch // groups
        waiting = {"pending.tokens.gate": (pending.tokens.gate, "float groups members capacity")}
        check_arrays(sizes=sizes, **waiting)


def _reorder(tree: Any, order: Int[Array, "groups length"]) -> Any:
    """Leaves `[groups, members, length, ...]` with each group's positions in the given order."""

    def reorder(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, jnp.expand_dims(order, (1, *range(3, x.ndim))), axis=2)

    return jax.tree.map(reorder, tree)


def _measures(
    slot_ids: Int[Array, "batch length places"], num_slots: int, partition: Partition | None
) -> AccessMeasures:
    """How evenly all tokens use the slots, each device counting its own sequences' accesses."""
    if partition is None:
        counts = access_counts(slot_ids, num_slots)
    else:
        counts = partition.run(
            lambda ids: jax.lax.psum(access_counts(ids, num_slots), partition.token_axes),
            in_specs=partition.tokens(),
            out_specs=P(),
        )(slot_ids)
    return measures_of_counts(counts, slot_ids.size)


def _facts(rule, signals, losses, paired, access, info, partition=None) -> FastWeightInfo:
    """The record of one call; `info` is the rule's, by group and chunk, or None without writes."""
    slots = rule.num_slots
    facts = FastWeightInfo(
        memory_loss=jnp.sum(losses) / jnp.maximum(jnp.sum(paired), 1.0),
        token_loss=losses,
        gate=signals.gate,
        write=jax.tree.map(jnp.mean, info),
        access=access,
        measures=None if slots is None else _measures(access.slot_ids, slots, partition),
    )
    return jax.lax.stop_gradient(facts)
