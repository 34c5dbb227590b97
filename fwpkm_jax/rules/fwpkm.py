"""Fast-weight product-key memory: a large table of slots, rewritten where it was read."""

import functools
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import (
    Queries,
    SlotIds,
    SlotWeights,
    SubKeys,
    TokenValues,
)
from fwpkm_jax.core.checks import check_key
from fwpkm_jax.core.chunks import (
    RunOutput,
    StepOutput,
    cast,
    check_chunk_size,
    from_chunks,
    map_groups,
    map_unshared,
    to_chunks,
)
from fwpkm_jax.core.slots.keys.addressing import (
    Address,
    Nonlinearity,
    Score,
    SubKeyChoice,
    slot_weights,
)
from fwpkm_jax.core.slots.keys.scan import Find, KeyLoops
from fwpkm_jax.core.slots.options.blocks import ChunkBlocks, write_in_blocks
from fwpkm_jax.core.slots.options.devices import MemoryAxes, write_split_values
from fwpkm_jax.core.slots.options.overlay import (
    AnyTable,
    OverlayTable,
    overlays_of,
    rows_to_read,
    whole_table,
    write_overlays,
)
from fwpkm_jax.core.slots.options.replay import JoinedTokens, join_stored
from fwpkm_jax.core.slots.options.retention import (
    Retention,
    SlotHistory,
    init_history,
    retentive_step,
    scale_chunks,
)
from fwpkm_jax.core.slots.two_phase import move_keys, write_values
from fwpkm_jax.core.slots.values.exchange import RowOps
from fwpkm_jax.core.slots.values.table import slot_read, update_norm, value_step
from fwpkm_jax.core.slots.write import (
    KeyWrite,
    SlotAccess,
    SlotChunk,
    SlotWriteWeights,
    ValueWrite,
    addressing_loss,
)
from fwpkm_jax.literals import Bound, Count, Natural, NotNegative, Positive, check_fields
from fwpkm_jax.rules.base import AbstractChunkRule, check_memory, check_query, check_run
from pallas_kernels import slot_read as read_kernels
from pallas_kernels.dispatch import Backend, Kernel
from pallas_kernels.key_scan import KEY_SCAN, key_loops
from pallas_kernels.product_top_k import choose_sub_keys, pair_sub_keys
from pallas_kernels.row_ops import VALUE_SCAN, row_ops

KeyLoss = Literal["addressing", "reconstruction", "both"]


class FwPKMMemory(NamedTuple):
    """Fast weights of one memory.

    Attributes:
      keys: `[heads, 2, subkeys, key // 2]`, rows first.
      values: `[slots, value]`, slot = row * subkeys + column; an array or an overlay.
      history: of the slots, for a rule with `retention`, or None.
    """

    keys: SubKeys
    values: AnyTable
    history: SlotHistory | None = None


class FwPKMInfo(NamedTuple):
    """Measures of one write.

    Attributes:
      addressing_loss: negative marginal entropy of both codebooks, before the write.
      update_norm: Euclidean norm of the change of the value table; of several inner steps and
        replays, the root of the sum of their squares.
    """

    addressing_loss: Float[Array, ""]
    update_norm: Float[Array, ""]

    logged = ("addressing_loss",)  # The norm of the change reads the written rows once more.


@dataclass(frozen=True, kw_only=True)
class FwPKM(AbstractChunkRule):
    """A product-key memory that writes one normalised gradient step per chunk (arXiv:2601.00671).

    Everything is computed in the dtype of the memory, also if the tokens have another one.

    Example:
      >>> import jax
      >>> from fwpkm_jax import FwPKM
      >>> rule = FwPKM(num_subkeys=8, key_dim=4, value_dim=6, top_k=2)
      >>> memory = rule.init(jax.random.key(0))
      >>> memory.values.shape  # 8 x 8 slots, a row for each.
      (64, 6)
    """

    num_subkeys: int = 512
    """Sub-keys per codebook; the memory has num_subkeys**2 slots."""
    key_dim: int = 512
    """Width of a query, both halves together; even."""
    value_dim: Annotated[int, Bound(2)] = 512
    """Width of a slot's value."""
    num_heads: Count = 1
    """Queries per token; all heads share the value table."""
    top_k: int = 8
    """Slots read per head."""
    lookahead: Natural = 1
    """A token's target is the value this many tokens later."""
    score: Score = "idw"
    """Score of a sub-key: inverse-distance weight (idw) or inner product (dot)."""
    learning_rate: NotNegative = 1.0
    """Size of the write, of values and keys."""
    value_step: NotNegative | None = None
    """Multiplies the value gradient; None: num_heads * top_k, which undoes the mean read weight."""
    key_loss: KeyLoss = "addressing"
    """What moves the keys: the addressing entropy, the reconstruction error (ablation), or both."""
    addressing_weight: NotNegative = 1.0
    """Multiplies the addressing loss."""
    nonlinearity: Nonlinearity = "softmax"
    """From slot scores to read weights."""
    temperature: Positive = 1.0
    """Divides the slot scores before the nonlinearity."""
    inner_steps: Count = 1
    """Value steps per chunk, each from what the last one left. Keys move once."""
    write_clip: Positive | None = None
    """Bound on each element of the write's gradients, or None. Costs a pass over the table."""
    weight_decay: NotNegative = 0.0
    """Decay of keys and values at each write. Costs a pass over the table."""
    retention: Retention | None = None
    """How writes spare what slots hold; None: they do not."""
    backend: Backend = "auto"
    """Kernels (pallas), plain XLA (reference), or kernels where they run (auto)."""

    def __post_init__(self):
        check_fields(self)
        if self.key_dim < 2 or self.key_dim % 2:
            raise ValueError(f"key_dim={self.key_dim} must be even (two codebooks).")
        if not 1 <= self.top_k <= self.num_subkeys:
            raise ValueError(
                f"top_k={self.top_k} must lie between 1 and num_subkeys={self.num_subkeys}."
            )
        if self.retention is not None and (self.write_clip is not None or self.weight_decay):
            raise ValueError(
                f"retention={self.retention} spares touched slots, but "
                f"write_clip={self.write_clip} and weight_decay={self.weight_decay} go over all; "
                "leave one of them out."
            )

    @property
    def num_slots(self) -> int:
        return self.num_subkeys**2

    @property
    def inactive_parameters(self) -> int:
        return self.value_dim * (self.num_slots - self.num_heads * self.top_k)

    @classmethod
    def tiny(cls) -> "FwPKM":
        return cls(num_subkeys=5, key_dim=6, value_dim=4, num_heads=2, top_k=3)

    @functools.cached_property
    def memory_shapes(self) -> FwPKMMemory:
        # Declared, not traced from `init`: memories are compared with them in every call.
        shapes = (
            (self.num_heads, 2, self.num_subkeys, self.key_dim // 2),
            (self.num_slots, self.value_dim),
        )
        arrays: Any = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        keys, values = arrays
        if self.retention is None:
            return FwPKMMemory(keys, values)
        history = functools.partial(init_history, self.retention)
        return FwPKMMemory(keys, values, jax.eval_shape(history, keys, values))

    def init(self, rng: jax.Array) -> FwPKMMemory:
        """Keys uniform within 1/sqrt(key_dim), values normal with variance 1/value_dim."""
        check_key(rng)
        key_rng, value_rng = jax.random.split(rng)
        bound, shapes = self.key_dim**-0.5, self.memory_shapes
        keys = jax.random.uniform(key_rng, shapes.keys.shape, jnp.float32, -bound, bound)
        values = jax.random.normal(value_rng, shapes.values.shape, jnp.float32)
        values = values * self.value_dim**-0.5
        history = None if self.retention is None else init_history(self.retention, keys, values)
        return FwPKMMemory(keys, values, history)

    def chunk(self, query: jax.Array, target: jax.Array, weights: Any) -> SlotChunk:
        if isinstance(weights, SlotWriteWeights):
            return SlotChunk(query, target, *weights)
        return SlotChunk(query, target, *weights, addressed=weights.counted)

    def read(self, memory: FwPKMMemory, query: Queries) -> tuple[TokenValues, SlotAccess]:
        check_memory(self, memory)
        check_query(self, query)
        _, access = _select(self, memory.keys, query, self.backend)
        return _read(self, memory.values, *access), access

    def address(self, memory: FwPKMMemory, query: Queries) -> tuple[jax.Array, jax.Array]:
        address, access = _select(self, memory.keys, query, self.backend)
        return access.slot_ids, address.slot_scores.reshape(access.slot_ids.shape)

    @property
    def two_phase(self) -> bool:
        """Whether keys move without reading the values, and a write only adds to touched rows."""
        # Reconstruction reads values to move keys; clipping and decay go over the whole table.
        return self.key_loss == "addressing" and self.write_clip is None and not self.weight_decay

    def run(self, memory: FwPKMMemory, sequence: SlotChunk, *, chunk_size: int) -> RunOutput:
        """`run_groups` of one memory; a scan of `step` where the write is not `two_phase`."""
        if not self.two_phase:
            return super().run(memory, sequence, chunk_size=chunk_size)
        _check_chunk(sequence)
        check_run(self, memory, sequence)
        # A group of one, which `map_groups` runs without vmap.
        one = map_unshared(lambda x: x[None], (memory, sequence))
        return map_unshared(lambda x: x[0], self.run_groups(*one, chunk_size=chunk_size))

    @property
    def supports_sharding(self) -> bool:
        # Each device writes its part of the table once for each chunk, without a word to the
        # others.
        return self.two_phase and self.retention is None and self.inner_steps == 1

    @property
    def keeps_bfloat16_queries(self) -> bool:
        # Retention joins new tokens with stored ones, which have the dtype of the memory.
        return self.two_phase and self.retention is None

    def memory_specs(
        self, memory: Any, *, group_axes: tuple[str, ...], axes: MemoryAxes | None
    ) -> FwPKMMemory:
        if axes is None:
            return super().memory_specs(memory, group_axes=group_axes, axes=None)
        keys: Any = PartitionSpec(group_axes)
        values: Any = PartitionSpec(group_axes, axes.slots, axes.columns)
        return FwPKMMemory(keys, values)

    def run_groups(
        self,
        memory: FwPKMMemory,
        sequence: SlotChunk,
        *,
        chunk_size: int,
        axes: MemoryAxes | None = None,
    ) -> RunOutput:
        """All slots first, then the values: `core.slots.two_phase`.

        On a Hopper GPU or a TPU the kernels that `pallas_kernels` chooses find sub-keys, move the
        keys and read and write the values; plain XLA elsewhere.
        """
        if not self.two_phase or (axes is not None and not self.supports_sharding):
            return super().run_groups(memory, sequence, chunk_size=chunk_size, axes=axes)
        check_chunk_size(sequence, chunk_size)
        _, batch, length = sequence.counted.shape
        # From here on all arrays are `[groups, chunks, tokens, ...]`, until `from_chunks`.
        chunks = jax.tree.map(lambda x: to_chunks(x, chunk_size), sequence)
        narrow = chunks.query.dtype == jnp.bfloat16 and self.keeps_bfloat16_queries
        query_dtype = jnp.bfloat16 if narrow else memory.values.dtype
        query = chunks.query.astype(query_dtype)
        chunks = cast(chunks, memory.values.dtype)._replace(query=query)
        joined = None
        if self.retention is not None and (stored := _history(self, memory).replayed) is not None:
            joined = join_stored(stored, chunks)
            chunks = joined.tokens

        # First phase: the keys move, and all slots are found.
        token_axes = () if axes is None else axes.tokens
        move = functools.partial(
            move_keys,
            find=_find(self, self.backend),
            key_write=_key_write(self),
            loops=_key_loops(self, memory.keys, chunks.query, token_axes),
            token_axes=token_axes,
        )
        # One memory's keys never depend on values, so its scan over the chunks runs ahead of them.
        keys, choice, loss = map_groups(move, memory.keys, chunks.query, chunks.addressed)
        # Pairs of sub-keys move no keys, so all chunks of all memories are paired at once.
        _, access = _slots_of(self, choice, self.backend)

        # Second phase: the values are read and written.
        how: dict[str, Any] = {"error_weights": chunks.error_weight, "counted": chunks.counted}
        how |= {"write": _value_write(self), "ops": _row_ops(self, memory.values)}
        # Options join here; a rule without them passes none.
        history = None
        if self.inner_steps > 1:
            how["inner_steps"] = self.inner_steps
        if self.retention is not None:
            history, retained = _retained(self, memory, access, chunks, joined)
            how |= retained
        split = functools.partial(write_split_values, axes=axes or MemoryAxes())
        write: Any = write_values if axes is None else split
        # An overlay runs on one device; the layer refuses one on a mesh.
        if isinstance(memory.values, OverlayTable):
            write = write_overlays
        out = write(memory.values, access, chunks.target, **how)
        read = (out.output, access)
        if joined is not None:  # Only the sequence's own tokens have been read for the caller.
            read = jax.tree.map(lambda x: x[:, :, joined.size :], read)
        output, access = jax.tree.map(lambda x: from_chunks(x, batch, length), read)
        info = jax.lax.stop_gradient(FwPKMInfo(loss, out.update_norm))
        return RunOutput(FwPKMMemory(keys, out.values, history), output, access, info)

    def write(self, memory: FwPKMMemory, chunk: SlotChunk) -> FwPKMMemory:
        # A chunk is a sequence of one chunk.
        sequence = jax.tree.map(lambda x: x[None], chunk._replace(cut=None))
        return self.run(memory, sequence, chunk_size=chunk.write_weight.shape[0]).memory

    def convert_memory(self, memory: Any) -> FwPKMMemory:
        if isinstance(memory, FwPKMMemory):
            memory = memory._replace(history=None)
            if self.retention is not None:
                begin = functools.partial(init_history, self.retention)
                memory = memory._replace(history=jax.vmap(begin)(memory.keys, memory.values))
        return super().convert_memory(memory)

    def overlay(self, memory: FwPKMMemory, base: FwPKMMemory, *, capacity: int) -> FwPKMMemory:
        if not self.supports_sharding:
            raise ValueError(
                f"key_loss={self.key_loss!r}, write_clip={self.write_clip}, "
                f"weight_decay={self.weight_decay}, retention={self.retention} and "
                f"inner_steps={self.inner_steps} have no overlay: writes must reach the rows that "
                "they read and no others, once; use key_loss='addressing' and none of the others, "
                "or a private memory for each user."
            )
        check_memory(self, memory, groups=True)
        check_memory(self, base, groups=True)
        return FwPKMMemory(memory.keys, overlays_of(memory.values, base.values, capacity=capacity))

    def write_blocks(self, memory: FwPKMMemory, blocks: ChunkBlocks) -> FwPKMMemory:
        if not self.supports_sharding:
            # Other writes need the whole chunk at once, so it is formed.
            return super().write_blocks(memory, blocks)
        block, dtype = blocks.block, memory.values.dtype
        keys, values = write_in_blocks(
            memory.keys,
            memory.values,
            blocks._replace(block=lambda number: cast(block(number), dtype)),
            select=functools.partial(_select, self, backend=self.backend),
            read=functools.partial(_read, self),
            key_write=_key_write(self),
            value_write=_value_write(self),
            ops=_row_ops(self, memory.values),
        )
        return FwPKMMemory(keys, values)

    def step(self, memory: FwPKMMemory, chunk: SlotChunk) -> StepOutput:
        _check_chunk(chunk)
        table = whole_table(memory.values)
        chunk = cast(chunk, table.dtype)
        address, access = _select(self, memory.keys, chunk.query, "reference")
        output = slot_read(table, *access)
        after, norms = memory, []
        for _ in range(self.inner_steps):
            before = whole_table(after.values)
            # With the history from before the chunk, in which every step finds the same.
            after, norm = _inner_step(self, memory._replace(values=before), chunk, access)
            norms.append(norm)
        # From the keys before the chunk: values and keys are written at the same time.
        keys = _key_write(self).step(memory.keys, key_gradient(self, memory, chunk, address))
        loss = addressing_loss(address, num_subkeys=self.num_subkeys, token_weights=chunk.addressed)
        info = FwPKMInfo(addressing_loss=loss, update_norm=jnp.linalg.norm(jnp.stack(norms)))
        return StepOutput(after._replace(keys=keys), output, access, jax.lax.stop_gradient(info))


def _check_chunk(chunk: Any) -> None:
    """Refuses what says less of each token than a `SlotChunk`."""
    if not hasattr(chunk, "error_weight"):
        raise ValueError(
            f"{type(chunk).__name__} has no field addressed, each token's weight in the addressing "
            "loss; make what FwPKM reads and writes by its `chunk` or `sequence`."
        )


def _retained(
    rule: FwPKM,
    memory: FwPKMMemory,
    access: SlotAccess,
    chunks: SlotChunk,
    joined: JoinedTokens | None,
) -> tuple[SlotHistory, dict[str, Any]]:
    """The history after all chunks, and what `write_values` needs of it.

    Replayed tokens are written first and in full.
    """
    assert rule.retention is not None
    history = _history(rule, memory)._replace(replayed=None)
    # Replayed tokens have counted in the history when they were new.
    new = 1.0 if joined is None else 1.0 - joined.first
    history, scales = scale_chunks(
        history,
        access,
        new * chunks.write_weight,
        new * chunks.counted,
        retention=rule.retention,
    )
    if joined is None:
        return history, {"scales": scales}
    scales = jnp.where(joined.first[..., None] > 0, 1.0, scales)
    return history._replace(replayed=joined.stored), {"scales": scales, "first": joined.first}


def _inner_step(
    rule: FwPKM, memory: FwPKMMemory, chunk: SlotChunk, access: SlotAccess
) -> tuple[FwPKMMemory, Float[Array, ""]]:
    """The memory after one value step, keys as before, and the norm of the table's change."""
    table = whole_table(memory.values)
    if rule.retention is None:
        values = value_step(table, chunk, access, write=_value_write(rule))
        norm = update_norm(table, values, access.slot_ids)
        return memory._replace(values=values), norm
    step = retentive_step(
        table,
        _history(rule, memory),
        chunk,
        access,
        find=lambda query: _select(rule, memory.keys, query, "reference")[1],
        write=_value_write(rule),
        retention=rule.retention,
    )
    return memory._replace(values=step.values, history=step.history), step.update_norm


def _history(rule: FwPKM, memory: FwPKMMemory) -> SlotHistory:
    if memory.history is None:
        raise ValueError(
            f"This memory has no history of its slots, which {rule.retention} needs; start it "
            "with `init` of this rule, or give it one by `convert_memory`."
        )
    return memory.history


@functools.cache
def _value_write(rule: FwPKM) -> ValueWrite:
    step = float(rule.num_heads * rule.top_k) if rule.value_step is None else rule.value_step
    # A write that only adds to rows has the learning rate in its steps, as kernels take it.
    if rule.write_clip is None and not rule.weight_decay:
        return ValueWrite(step_size=rule.learning_rate * step)
    return ValueWrite(
        step_size=step,
        learning_rate=rule.learning_rate,
        clip=rule.write_clip,
        weight_decay=rule.weight_decay,
    )


@functools.cache
def _key_write(rule: FwPKM) -> KeyWrite:
    return KeyWrite(
        learning_rate=rule.learning_rate,
        # The reconstruction error moves the keys by `jax.grad`, see `key_gradient`.
        loss_weight=0.0 if rule.key_loss == "reconstruction" else rule.addressing_weight,
        score=rule.score,
        clip=rule.write_clip,
        weight_decay=rule.weight_decay,
    )


def _read(rule: FwPKM, values: AnyTable, slot_ids: SlotIds, weights: SlotWeights) -> TokenValues:
    rows, slot_ids = rows_to_read(values, slot_ids)
    return read_kernels.slot_read(rows, slot_ids, weights, backend=rule.backend).output


def _row_ops(rule: FwPKM, values: AnyTable) -> RowOps:
    """What reads and adds the rows that are written: of the table, or an overlay's own."""
    rows = values.rows if isinstance(values, OverlayTable) else values
    chosen = VALUE_SCAN.choose(rule.backend, rows, _value_write(rule))
    return RowOps() if chosen == "reference" else row_ops(chosen)


def _key_loops(
    rule: FwPKM, keys: jax.Array, queries: jax.Array, token_axes: tuple[str, ...]
) -> KeyLoops:
    """What goes over the chunks of the keys, given those of all memories and their queries."""
    # Under `vmap`, kernels would move one memory after the other.
    if len(keys) > 1 or token_axes:
        return KeyLoops()
    # Such a loop takes few sizes: backend="pallas" insists on kernels for the choice alone.
    request = "auto" if rule.backend == "pallas" else rule.backend
    arrays = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (keys, queries))
    chosen = KEY_SCAN.choose(request, *arrays, rule.top_k, _key_write(rule))
    return (
        KeyLoops() if chosen == "reference" else key_loops(typing.cast(Kernel, chosen), rule.top_k)
    )


@functools.cache
def _find(rule: FwPKM, backend: Backend) -> Find:
    """From queries and keys to the best sub-keys of each query."""
    return functools.partial(choose_sub_keys, top_k=rule.top_k, score=rule.score, backend=backend)


def _select(
    rule: FwPKM, keys: SubKeys, query: Queries, backend: Backend
) -> tuple[Address, SlotAccess]:
    """Where each query reads, and with which weights."""
    return _slots_of(rule, _find(rule, backend)(query.astype(keys.dtype), keys), backend)


def _slots_of(rule: FwPKM, choice: SubKeyChoice, backend: Backend) -> tuple[Address, SlotAccess]:
    """Where queries with these best sub-keys read, `[..., places]`, and with which weights."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[-3:]), choice)
    slot_ids, scores = pair_sub_keys(flat, num_subkeys=rule.num_subkeys, backend=backend)
    weights = slot_weights(scores, nonlinearity=rule.nonlinearity, temperature=rule.temperature)
    tokens = choice.sub_key_ids.shape[:-3]
    access = SlotAccess(slot_ids.reshape(*tokens, -1), weights.reshape(*tokens, -1))
    return Address(slot_ids, scores, *choice), access


def key_gradient(rule: FwPKM, memory: FwPKMMemory, chunk: SlotChunk, address: Address) -> SubKeys:
    """Gradient of the loss that moves the keys (`key_loss`), before clipping and decay."""
    gradient = _key_write(rule).gradient(
        memory.keys, chunk.query, address, token_weights=chunk.addressed
    )
    if rule.key_loss != "addressing":
        gradient = gradient + jax.grad(_reconstruction_loss)(memory.keys, rule, memory, chunk)
    return gradient


def _reconstruction_loss(
    keys: SubKeys, rule: FwPKM, memory: FwPKMMemory, chunk: SlotChunk
) -> Float[Array, ""]:
    """Half the mean squared error over pairs and features, as a function of the keys."""
    _, access = _select(rule, keys, chunk.query, "reference")
    # In plain JAX, so that `jax.grad` reaches the keys through the scores of the chosen slots.
    output = slot_read(whole_table(memory.values), *access)
    losses = chunk.write_weight * jnp.mean((output - chunk.target) ** 2, axis=-1)
    return 0.5 * jnp.sum(losses) / jnp.maximum(jnp.sum(chunk.paired), 1.0)
