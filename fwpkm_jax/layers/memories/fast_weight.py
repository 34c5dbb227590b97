"""A fast-weight memory as a layer: projections, gate, any chunk rule.

A memory layer is called as `layer(x, memory, *, mask, starts, write, pairing, partition)` and
returns its output, the memory and a record. It does not add the residual: the block that holds it
does. What streams, documents and several devices need is imported when they come.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.checks import check_arrays, check_key
from fwpkm_jax.core.chunks import (
    Memory,
    merge_groups,
    split_groups,
)
from fwpkm_jax.core.numerics import l2_normalize, standardize
from fwpkm_jax.core.slots.measures import AccessMeasures, access_measures
from fwpkm_jax.core.streams.pending import ChunkSize, NewDocuments, Pending, Signals, init_pending
from fwpkm_jax.core.targets import (
    Pairing,
    shift_left,
    write_weights,
)
from fwpkm_jax.layers.memories.checks import (
    check_initial,
    check_own_memory,
    check_pending,
    check_sequences,
    check_stream,
)
from fwpkm_jax.layers.memories.config import FastWeightConfig
from fwpkm_jax.layers.norms import RMSNorm, can_fold, normed_maps, normed_mix_map
from fwpkm_jax.layers.parameters import linear_map, parameter
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.rules.base import check_memory

_NORMALIZERS = {"none": lambda x: x, "standardize": standardize, "l2": l2_normalize}
_GATE_WIDTH = 8  # The gate is the sigmoid of a mean over this many projections.


class FastWeightInfo(NamedTuple):
    """What a memory layer did in one call.

    Attributes:
      memory_loss: mean over the paired tokens of gate-weighted mean squared error, before each
        chunk's write.
      token_loss: gate-weighted mean squared error of each token's read, 0 where it has no target.
      gate: of each token, 0 to 1: the share of the read in the output, or of the output.
      write: what the rule reports of its writes, its own NamedTuple, each field the mean over
        groups and chunks; None for a call that wrote by no chunk of the config's size: a frozen
        memory or a piece of a stream.
      access: what the rule reports of each token's read, leaves `[batch, length, ...]`, or None. A
        memory of slots has the fields `slot_ids` and `slot_weights`, `[batch, length, places]`.
      measures: how evenly this call used the slots; None for a memory without slots. O(slots) to
        compute, free when unused in jit.
      query: of each token, the one field with a gradient.
    """

    memory_loss: Float[Array, ""]
    token_loss: Float[Array, "batch length"]
    gate: Float[Array, "batch length"]
    write: Any
    access: Any
    measures: AccessMeasures | None
    query: Float[Array, "batch length heads key"]


class FastWeight(nnx.Module):
    """Reads and writes a memory with learned queries, targets and gate.

    The memory comes in and goes out as an argument with a leading axis of groups; sequences of one
    group share a memory, neighbours in the batch first.

    References: Zhao and Jones 2026, arXiv:2601.00671, section 3.

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
        # Not split along heads: all devices of a sequence find its slots.
        options: dict[str, Any] = {"init_std": init_std, "use_bias": True, "dtype": dtype}
        linear = functools.partial(linear_map, **options, rngs=rngs)

        def norm(features: int) -> RMSNorm:
            return RMSNorm(features, eps=norm_eps)

        self.query_norm = norm(model_dim)
        self.query_proj = linear(model_dim, rule.num_heads * rule.key_dim)
        drawn = self.query_proj.kernel[...]
        begun = rule.begin_map(drawn.reshape(model_dim, rule.num_heads, rule.key_dim))
        self.query_proj.kernel[...] = begun.reshape(drawn.shape)
        self.value_norm = norm(model_dim)
        self.value_proj = linear(model_dim, rule.value_dim)
        # Drawn in any case, so that later weights are the same with and without a gate.
        bias = nnx.initializers.constant(config.gate_bias)
        gate = norm(model_dim), linear(model_dim, _GATE_WIDTH, bias_init=bias)
        self.gate_norm, self.gate_proj = gate if config.has_gate else (None, None)
        # Of the mix of read and value, in the width of the memory.
        self.out_norm = norm(rule.value_dim)
        self.out_proj = linear(rule.value_dim, model_dim, None, "embed")
        first = None
        if rule.learned_start:  # Drawn last, as what other layers do not have.
            shape, init = rule.memory_shapes.values.shape, nnx.initializers.normal(init_std)
            values = init(rngs.params(), shape, jnp.float32)
            first = parameter(values, "embedding", ("slots", "columns"))
        self.first_values = first

    def init_memory(self, rng: jax.Array, *, groups: int = 1) -> Memory:
        """Fast weights before the first token, leaves `[groups, ...]`, every group the same."""
        check_key(rng)
        if groups < 1:
            raise ValueError(f"groups={groups} must be at least 1; 1 is one memory for all.")
        memory = self.config.rule.init(rng)
        memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (groups, *x.shape)), memory)
        return self.restart(memory)

    def restart(self, memory: Memory) -> Memory:
        """`memory` before the first token, with what the layer has learned of it by now.

        The way of gradients to a learned start; other rules' memories stay as they are.
        """
        if self.first_values is None:
            return memory
        first = self.first_values[...].astype(memory.values.dtype)
        return memory._replace(values=jnp.broadcast_to(first, memory.values.shape))

    def signals(
        self,
        x: Float[Array, "batch length model"],
        mask: TokenMask | None,
        *,
        narrow: bool = False,
    ) -> Signals:
        """The inputs of the memory for each token, in at least float32.

        With `narrow`, a projected query in bfloat16 that is not normalised stays as it is if the
        rule takes it.
        """
        rule = self.config.rule
        memory_dtype = jnp.promote_types(x.dtype, jnp.float32)
        maps = [(self.query_norm, self.query_proj), (self.value_norm, self.value_proj)]
        if self.gate_proj is not None and self.gate_norm is not None:
            maps.append((self.gate_norm, self.gate_proj))
        query, *others = normed_maps(x, maps)
        value, *gates = (y.astype(memory_dtype) for y in others)
        narrow = narrow and query.dtype == jnp.bfloat16 and self.config.query_norm == "none"
        if not (narrow and rule.keeps_bfloat16_queries):
            # The halves of the whole query, all heads together, as in the authors' release.
            halves = query.astype(memory_dtype).reshape(*x.shape[:2], 2, -1)
            query = _NORMALIZERS[self.config.query_norm](halves)
        query = query.reshape(*x.shape[:2], rule.num_heads, rule.key_dim)
        value = _NORMALIZERS[self.config.value_norm](value)
        ones = jnp.ones(x.shape[:2], memory_dtype)
        gate = jax.nn.sigmoid(jnp.mean(gates[0], axis=-1)) if gates else ones
        real = ones if mask is None else mask.astype(memory_dtype)
        return Signals(query, value, gate, real)

    def merge(
        self,
        read: Float[Array, "batch length value"],
        signals: Signals,
        *,
        dtype: DTypeLike,
        sequences: int | None = 1,
    ) -> Float[Array, "batch length model"]:
        """The layer's output in `dtype`, from what the tokens read.

        So many neighbouring `sequences` were read chunk by chunk, so that their reads of a chunk
        stand one after the other. None: arrays of several devices, which no kernel takes.
        """
        gate, maps = signals.gate[..., None], [(self.out_norm, self.out_proj)]
        if self.config.gate_output and sequences is not None and can_fold(maps):
            output = normed_mix_map(
                *(read, signals.value, signals.gate, maps),
                dtype=dtype,
                sequences=sequences,
                chunk_size=self.config.chunk_size,
            )
        else:
            if self.config.gate_output:
                mixed = gate * read + (1.0 - gate) * signals.value
            else:
                mixed = read + signals.value
            (output,) = normed_maps(mixed, maps, dtype=dtype)
        if self.config.gate_residual:
            output = gate * output
        if self.config.full_read is not None:
            size = jnp.mean(jnp.square(read), axis=-1, keepdims=True)
            output = output * jnp.minimum(size / self.config.full_read**2, 1.0)
        return output.astype(dtype)

    def _finish(
        self,
        signals: Signals,
        read: Float[Array, "batch length value"],
        losses: Float[Array, "batch length"],
        paired: Float[Array, "batch length"],
        access: Any,
        partition: Partition | None,
        *,
        dtype: DTypeLike,
        write: Any = None,
        sequences: int = 1,
    ) -> tuple[Float[Array, "batch length model"], FastWeightInfo]:
        """A call's output and record; `write` is the rule's, by group and chunk, None without."""
        rule, measures = self.config.rule, None
        if rule.num_slots is not None:
            measure = functools.partial(access_measures, num_slots=rule.num_slots)
            if partition is not None:  # Each device counts its own sequences' accesses.
                measure = functools.partial(measure, axes=partition.token_axes)
                measure = partition.run(measure, in_specs=partition.tokens(), out_specs=P())
            measures = measure(access.slot_ids)
        facts = FastWeightInfo(
            memory_loss=jnp.sum(losses) / jnp.maximum(jnp.sum(paired), 1.0),
            token_loss=losses,
            gate=signals.gate,
            write=jax.tree.map(jnp.mean, write),
            access=access,
            measures=measures,
            query=signals.query,
        )
        together = None if partition is not None else sequences
        output = self.merge(read, signals, dtype=dtype, sequences=together)
        return output, jax.lax.stop_gradient(facts)._replace(query=signals.query)

    def __call__(
        self,
        x: Float[Array, "batch length model"],
        memory: Memory,
        *,
        mask: TokenMask | None = None,
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
          partition: of the work and the memories over devices. A memory that is only read lies
            whole on each of them.

        Returns:
          What the block adds to the residual stream, the memory after the last write, and what
          happened. With `starts` and `documents="document"` the memory is that of each sequence's
          last document, and the record has no measures of writes.

        Raises:
          ValueError: an argument does not fit the layer; or `documents="document"` with a memory
            of several sequences, or one that devices share (`mesh.memory`).
        """
        config, rule = self.config, self.config.rule
        self._check(x, mask, memory, starts)
        if write and starts is not None and config.documents == "document":
            return self._by_documents(x, memory, mask, starts, pairing, partition)
        # The tokens of several devices are joined in float32.
        signals = self.signals(x, mask, narrow=write and partition is None)
        # Each token is paired with the value that it should have read.
        sequence = rule.sequence(
            signals.query,
            signals.value,
            gate=signals.gate if config.weight_by_gate else None,
            mask=mask,
            chunk_size=config.chunk_size,
            pairing=pairing,
        )
        if starts is not None:
            from fwpkm_jax.layers.memories.documents import within_documents

            sequence = within_documents(sequence, starts, lookahead=rule.lookahead)
        groups = jax.tree.leaves(memory)[0].shape[0]
        if write and partition is None:
            # Sequences of one group share a memory, which is read and written chunk by chunk.
            grouped = jax.tree.map(lambda leaf: split_groups(leaf, groups), sequence)
            memory, read, access, info = rule.run_groups(
                memory, grouped, chunk_size=config.chunk_size
            )
            read, access = jax.tree.map(merge_groups, (read, access))
        else:
            from fwpkm_jax.layers.memories.parts import read_or_run

            memory, read, access, info = read_or_run(
                config, memory, sequence, write=write, partition=partition
            )
        # What was read before each write, with the weight that the write gave it.
        losses = sequence.write_weight * jnp.mean((read - sequence.target) ** 2, axis=-1)
        output, facts = self._finish(
            *(signals, read, losses, sequence.paired, access, partition),
            dtype=x.dtype,
            write=info,
            # What is written chunk by chunk is read in that order, too; see `merge`.
            sequences=len(x) // groups if write else 1,
        )
        return output, memory, facts

    def _by_documents(
        self,
        x: Float[Array, "batch length model"],
        memory: Memory,
        mask: TokenMask | None,
        starts: Bool[Array, "batch length"],
        pairing: Pairing,
        partition: Partition | None,
    ) -> tuple[Float[Array, "batch length model"], Memory, FastWeightInfo]:
        """The layer's call for rows whose documents each start from the memory that comes in."""
        check_own_memory(memory, len(x), partition)
        config, signals = self.config, self.signals(x, mask)
        loss_gate = signals.gate if config.weight_by_gate else jnp.ones_like(signals.gate)
        from fwpkm_jax.layers.memories.documents import run_documents

        out = run_documents(
            config.rule,
            memory,
            signals._replace(gate=loss_gate),
            starts.astype(bool),
            mask,
            chunk_size=config.chunk_size,
            pairing=pairing,
            partition=partition,
        )
        output, facts = self._finish(
            *(signals, out.read, out.losses, out.paired, out.access, partition), dtype=x.dtype
        )
        return output, out.memory, facts

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
        mask: TokenMask | None = None,
        numbers: Int[Array, "batch length"] | None = None,
        starts: Bool[Array, "batch length"] | None = None,
        initial: Memory | None = None,
        chunk_size: ChunkSize | None = None,
        write: bool = True,
        partition: Partition | None = None,
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
            with a value of another. None: all are of document 1.
          starts: true at the first token of each document, where `numbers` change. They matter with
            `documents="document"`: the memory then is `initial` again, and tokens of the document
            before that still wait are dropped, because no token could read their write. With
            "carry" the memory goes on.
          initial: fast weights that documents start from, like `memory`.
          chunk_size: tokens per write for this call; None: the config's. "flush": nothing is
            written before `flush` is called, and the queue must have room until then.
          write: False reads with the memory that is passed in; no token is queued or written. A
            document that starts still brings its own memory and queue.
          partition: of the tokens over devices, with an axis `sequence`. Every device has the whole
            memory and writes all tokens of its sequences, so that no table travels.

        Raises:
          ValueError: an argument does not fit the layer; with `documents="document"`, `starts` come
            without `initial` or with a memory of several sequences; or the memories do not lie as
            `partition` asks.
        """
        rule = self.config.rule
        chunk_size = self.config.chunk_size if chunk_size is None else chunk_size
        self._check(x, mask, memory, starts, pending)
        signals = self.signals(x, mask)
        groups = jax.tree.leaves(memory)[0].shape[0]
        loss_gate = signals.gate if self.config.weight_by_gate else jnp.ones_like(signals.gate)
        documents = None
        if starts is not None and self.config.documents == "document":
            check_initial(rule, memory, initial, len(x))
            documents = NewDocuments(starts.astype(bool), initial)
        queued = signals._replace(gate=loss_gate)
        # A pair may end in a later call; here it counts if both of its tokens are in this one.
        paired = signals.mask * shift_left(signals.mask, rule.lookahead)
        if numbers is not None:
            numbers = numbers.astype(signals.mask.dtype)
            paired *= (numbers == shift_left(numbers, rule.lookahead)).astype(paired.dtype)
            if self.config.documents == "carry":
                queued = queued._replace(mask=signals.mask * numbers)
        queued = jax.tree.map(lambda leaf: split_groups(leaf, groups), queued)
        if partition is not None:
            check_stream(memory, partition)
        if write or documents is not None:
            from fwpkm_jax.layers.memories.stream import advance

            memory, pending, read, access = advance(
                rule,
                memory,
                pending,
                queued,
                documents=documents,
                chunk_size=chunk_size,
                write=write,
                has_padding=mask is not None,
                partition=partition,
            )
        else:
            from fwpkm_jax.layers.memories.parts import read_partitioned

            read, access = read_partitioned(rule, memory, queued.query, partition)
        read, access = jax.tree.map(merge_groups, (read, access))
        if partition is not None:
            read, access = jax.tree.map(partition.by_sequence, (read, access))
        target = rule.targets(signals.value)
        # A pair counts in the losses of the call that brings both of its tokens.
        losses = loss_gate * paired * jnp.mean((read - target) ** 2, axis=-1)
        output, facts = self._finish(
            *(signals, read, losses, paired, access, partition), dtype=x.dtype
        )
        return output, memory, pending, facts

    def flush(
        self, memory: Memory, pending: Pending, *, partition: Partition | None = None
    ) -> tuple[Memory, Pending]:
        """Writes the complete waiting pairs now; see `core.streams.flush.flush`.

        Args:
          memory: fast weights.
          pending: from `stream`.
          partition: as in `stream`.
        """
        check_memory(self.config.rule, memory, groups=True)
        check_pending(pending, memory)
        if partition is not None:
            check_stream(memory, partition)
        from fwpkm_jax.layers.memories.stream import write_waiting

        return write_waiting(self.config.rule, memory, pending, partition=partition)

    def _check(
        self, x: Any, mask: Any, memory: Memory, starts: Any, pending: Pending | None = None
    ) -> None:
        """Raises a ValueError that names the argument which does not fit the layer."""
        sizes = check_arrays(
            x=(x, "float batch length model"),
            mask=(mask, "mask batch length"),
            starts=(starts, "mask batch length"),
            sizes={"model": self.query_proj.in_features},
        )
        check_memory(self.config.rule, memory, groups=True)
        if self.config.rule.reads_own_writes:
            check_sequences(self.config.rule, memory, sizes["batch"])
        if pending is not None:
            check_pending(pending, memory, batch=sizes["batch"])
