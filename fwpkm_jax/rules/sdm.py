"""Sparse Delta Memory: a table of slots that the gated delta rule writes at every token."""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.array_types import Queries, TokenValues
from fwpkm_jax.core.checks import check_key
from fwpkm_jax.core.chunks import (
    Chunk,
    RunOutput,
    StepOutput,
    cast,
    check_chunk_size,
    from_chunks,
    map_unshared,
    to_chunks,
)
from fwpkm_jax.core.numerics import unit_normalize
from fwpkm_jax.core.slots.delta.addressing import best_slots
from fwpkm_jax.core.slots.delta.chunks import sparse_delta
from fwpkm_jax.core.slots.delta.definition import (
    Decay,
    DeltaTokens,
    FirstTable,
    write_and_read,
)
from fwpkm_jax.core.slots.delta.documents import sparse_delta_in_documents
from fwpkm_jax.core.slots.keys.addressing import slot_weights
from fwpkm_jax.core.slots.options.devices import (
    MemoryAxes,
    columns_for_tokens,
    gather_tokens,
    tokens_for_columns,
)
from fwpkm_jax.core.slots.options.overlay import (
    AnyTable,
    OverlayTable,
    close_rows,
    open_written,
    overlays_of,
    rows_to_read,
    whole_table,
)
from fwpkm_jax.core.slots.values.table import slot_read
from fwpkm_jax.core.slots.write import SlotAccess
from fwpkm_jax.core.streams.pending import NewDocuments
from fwpkm_jax.literals import Count, Positive, check_fields
from fwpkm_jax.rules.base import AbstractChunkRule, check_memory, check_query, check_run
from pallas_kernels.row_ops import chosen_sums

_BLOCK = 32  # Tokens computed at once; changes speed, and results by rounding only.


class SDMMemory(NamedTuple):
    """Fast weights of one memory.

    Attributes:
      values: `[slots, value]`, slot = row * subkeys + column; an array or an overlay.
      last: of a rule with `keys="previous"` the last token's scores of rows and columns to write,
        `[heads, 2 * subkeys]`; zeros before the first token.
    """

    values: AnyTable
    last: Float[Array, "*groups heads scores"] | None = None


@dataclass(frozen=True, kw_only=True)
class SDM(AbstractChunkRule):
    """A table of slots, a few of which each token writes by the gated delta rule, then reads.

        M[s] <- exp(g) M[s]                          of the slots that the token writes
        M[s[n]] <- M[s[n]] + k[n] b (v - sum of k[n] M[s[n]])
        y = sum of q[m] M[s[m]]                      the read slots, after the write

    v is the token's value. The product keys belong to the layer's map to queries, which gives the
    scores of all rows and columns: of the slots to write, then of those to read, then the logits of
    decay and strength. g is minus their softplus; b is the sigmoid times the token's write weight,
    which a memory layer takes from its gate unless `weight_by_gate` is off. The heads of a token
    share table, value, decay and strength.

    Tokens write one after the other, so that the size of chunks does not matter. The tokens of a
    chunk of several sequences write in the order in which they lie in it; a memory layer takes one
    sequence for each memory.

    References: Cabannes et al. 2026, arXiv:2607.07386.

    Example:
      >>> import jax
      >>> from fwpkm_jax.rules import SDM
      >>> rule = SDM(num_subkeys=8, value_dim=6, num_writes=4, num_reads=4)
      >>> rule.key_dim  # Scores of 8 rows and columns to write and to read, decay and strength.
      34
      >>> rule.init(jax.random.key(0)).values.shape  # 8 x 8 slots, a row for each.
      (64, 6)
    """

    num_subkeys: Count = 256
    """Rows, and columns, of slots; the memory has num_subkeys**2 slots."""
    value_dim: Count = 256
    """Width of a slot's value."""
    num_heads: Count = 1
    """Queries per token; all heads share the table."""
    num_writes: Count = 64
    """Slots that each head of a token writes."""
    num_reads: Count = 64
    """Slots that each head of a token reads."""
    temperature: Positive = 1.0
    """Divides the scores of the chosen slots before the softmax."""
    write_norm: Literal["softmax", "unit"] = "softmax"
    """Write weights: softmax over the written slots, or that divided by its Euclidean norm, so that
    a write of strength 1 replaces all that the token would read where it writes."""
    read_norm: Literal["softmax", "unit"] = "softmax"
    """Read weights, likewise. With both "unit" a token reads what a write of strength 1 under its
    own slots and weights has put there."""
    keys: Literal["own", "previous"] = "own"
    """Where a token writes: under its own scores, or those of the token before, so that a token
    that reads finds what followed it earlier, as FwPKM pairs a query with the next value. The first
    token then has scores of 0."""
    read_start: Literal["own", "writes"] = "own"
    """Where the map to the scores of the read slots begins: drawn apart, or as a copy of that to
    the scores of the written slots; then both are trained, each by itself."""
    decay: Decay | Literal["none"] = "slot"
    """How much a token's decay acts on the slots that it writes: on all alike, to the power of
    their write weights ("weighted"), or not at all."""
    decay_bias: float = -4.6
    """Added to the projected decay before softplus. -4.6: a write keeps 99 % of a slot at first."""
    strength_bias: float = 0.0
    """Added to the projected strength before the sigmoid. 0: a write corrects half at first."""
    first_table: FirstTable = "zeros"
    """What memories start from: zeros, or a table that a layer learns with its other weights and
    `FastWeight.init_memory` gives. To train it, `training.memory.lifetime` is "batch"."""

    reads_own_writes = True
    long_writes = False  # Each token is a write of its own.

    def __post_init__(self):
        check_fields(self)
        for name in ("num_writes", "num_reads"):
            if getattr(self, name) > self.num_subkeys:
                raise ValueError(
                    f"{name}={getattr(self, name)} exceeds num_subkeys={self.num_subkeys}; a head "
                    "finds at most one slot for each row; lower it."
                )

    @property
    def learned_start(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.first_table == "learned"

    @property
    def key_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Width of a query: scores of rows and columns to write and to read, decay, strength."""
        return 4 * self.num_subkeys + 2

    @property
    def num_slots(self) -> int:
        return self.num_subkeys**2

    @property
    def inactive_parameters(self) -> int:
        used = self.num_heads * (self.num_writes + self.num_reads)
        return self.value_dim * max(0, self.num_slots - used)

    @classmethod
    def tiny(cls) -> "SDM":
        return cls(
            num_subkeys=4,
            value_dim=3,
            num_heads=2,
            num_writes=2,
            num_reads=3,
            keys="previous",
            read_norm="unit",
        )

    @functools.cached_property
    def memory_shapes(self) -> SDMMemory:
        shapes = (self.num_slots, self.value_dim), (self.num_heads, 2 * self.num_subkeys)
        arrays: Any = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        values, last = arrays
        return SDMMemory(values, last if self.keys == "previous" else None)

    def init(self, rng: jax.Array) -> SDMMemory:
        """A table of zeros."""
        check_key(rng)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.memory_shapes)

    def begin_map(self, kernel: Float[Array, "model heads key"]) -> jax.Array:
        if self.read_start == "own":
            return kernel
        scores = 2 * self.num_subkeys
        return kernel.at[..., scores : 2 * scores].set(kernel[..., :scores])

    def read(self, memory: SDMMemory, query: Queries) -> tuple[TokenValues, SlotAccess]:
        check_memory(self, memory)
        check_query(self, query)
        access = self._reads(query.astype(memory.values.dtype))
        rows, places = rows_to_read(memory.values, access.slot_ids)
        return slot_read(rows, places, access.slot_weights), access

    def address(self, memory: SDMMemory, query: Queries) -> tuple[jax.Array, jax.Array]:
        scores = _scores(query.astype(memory.values.dtype), self.num_subkeys)[1]
        slot_ids, slot_scores = best_slots(scores, self.num_reads)
        return slot_ids.reshape(len(query), -1), slot_scores.reshape(len(query), -1)

    def overlay(self, memory: SDMMemory, base: SDMMemory, *, capacity: int) -> SDMMemory:
        check_memory(self, memory, groups=True)
        check_memory(self, base, groups=True)
        values = overlays_of(memory.values, base.values, capacity=capacity)
        return memory._replace(values=values)

    def step(self, memory: SDMMemory, chunk: Chunk) -> StepOutput:
        table = whole_table(memory.values)
        chunk = cast(chunk, memory.values.dtype)
        query, last = chunk.query, memory.last
        if last is not None:
            query, last = _under_previous(last, query, chunk.counted)
        tokens, access = self._tokens(chunk._replace(query=query))
        decay = "slot" if self.decay == "none" else self.decay
        table, output = write_and_read(table, tokens, decay=decay)
        return StepOutput(SDMMemory(table, last), output, access, None)

    def run(self, memory: SDMMemory, sequence: Chunk, *, chunk_size: int) -> RunOutput:
        check_run(self, memory, sequence)
        one = map_unshared(lambda x: x[None], (memory, sequence))
        return map_unshared(lambda x: x[0], self.run_groups(*one, chunk_size=chunk_size))

    @property
    def supports_sharding(self) -> bool:
        # Columns do not interact once all tokens' slots and weights are known.
        return True

    def memory_specs(
        self, memory: Any, *, group_axes: tuple[str, ...], axes: MemoryAxes | None
    ) -> SDMMemory:
        if axes is None:
            return super().memory_specs(memory, group_axes=group_axes, axes=None)
        if axes.slots:
            raise ValueError(
                f"mesh.memory='slots' with {type(self).__name__}: a token's write needs what it "
                "reads of all its slots, wherever they lie; use mesh.memory=independent, with "
                "mesh.model or mesh.sequence for parts of the table by columns."
            )
        if axes.tokens and self.keys == "previous":
            raise ValueError(
                "mesh.sequence with keys='previous': the token before lies on another device; use "
                "mesh.model for parts of the table by columns."
            )
        values: Any = PartitionSpec(group_axes, None, axes.columns)
        last: Any = PartitionSpec(group_axes)
        return SDMMemory(values, last if self.keys == "previous" else None)

    def run_groups(
        self,
        memory: SDMMemory,
        sequence: Chunk,
        *,
        chunk_size: int,
        axes: MemoryAxes | None = None,
        documents: NewDocuments | None = None,
    ) -> RunOutput:
        """All slots first, then the table: `core.slots.delta.chunks`.

        Devices that share tables by columns exchange slots and weights, and values for columns,
        before the scan, and what was read after it.

        Args:
          documents: where documents start, each with a table of its own, in memories of one
            sequence; None: nowhere.
        """
        check_chunk_size(sequence, chunk_size)
        batch, length = sequence.counted.shape[1:]
        chunks = jax.tree.map(lambda x: to_chunks(x, chunk_size), sequence._replace(cut=None))
        chunks = cast(chunks, memory.values.dtype)
        shape, axes, last = chunks.counted.shape, axes or MemoryAxes(), memory.last
        if last is not None:
            query, counted = (
                x.reshape(shape[0], -1, *x.shape[3:]) for x in (chunks.query, chunks.counted)
            )
            new = None if documents is None else (documents.starts, documents.memory.last)
            query, last = jax.vmap(_under_previous)(last, query, counted, new)
            chunks = chunks._replace(query=query.reshape(chunks.query.shape))
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), chunks)
        tokens, access = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), self._tokens(flat))
        values = tokens_for_columns(tokens.values, axes)
        tokens = jax.tree.map(lambda x: gather_tokens(x, axes, dim=2), tokens._replace(values=None))
        # The order of the tokens in their chunks, and chunk after chunk.
        tokens = jax.tree.map(
            lambda x: x.reshape(shape[0], -1, *x.shape[3:]), tokens._replace(values=values)
        )
        how: Any = {"decay": "slot" if self.decay == "none" else self.decay, "chunk_size": _BLOCK}
        how["sums"] = chosen_sums(memory.values)
        if isinstance(memory.values, OverlayTable):  # On one device, without documents.
            counted = chunks.counted.reshape(shape[0], -1)
            ids = tokens.write_ids, tokens.read_ids
            opened, read_ids = open_written(memory.values, *ids, counted)
            tokens = tokens._replace(write_ids=opened.slot_ids, read_ids=read_ids)
            rows, output = sparse_delta(opened.rows, tokens, **how)
            table = close_rows(opened.values, rows[:, : memory.values.capacity + 1])
        elif documents is None:
            table, output = sparse_delta(memory.values, tokens, **how)
        else:
            fresh = documents.memory.values
            table, output = sparse_delta_in_documents(
                memory.values, tokens, documents.starts, fresh=fresh, **how
            )
        output = columns_for_tokens(output.reshape(*values.shape), axes)
        output, access = jax.tree.map(lambda x: from_chunks(x, batch, length), (output, access))
        return RunOutput(SDMMemory(table, last), output, access, None)

    def write(self, memory: SDMMemory, chunk: Chunk) -> SDMMemory:
        sequence = jax.tree.map(lambda x: x[None], chunk._replace(cut=None))
        return self.run(memory, sequence, chunk_size=chunk.write_weight.shape[0]).memory

    def _tokens(self, chunk: Chunk) -> tuple[DeltaTokens, SlotAccess]:
        """What tokens write and read, and where they read, leaves `[tokens, ...]`."""
        (scores, _), tokens = _scores(chunk.query, self.num_subkeys), len(chunk.query)
        write_ids, write_scores = best_slots(scores, self.num_writes)
        write_weights = slot_weights(write_scores, temperature=self.temperature)
        write_weights = write_weights.reshape(tokens, -1)
        if self.write_norm == "unit":
            write_weights = unit_normalize(write_weights)
        steps, logits = jnp.mean(chunk.query[:, :, -2:], axis=1).T
        log_decay = jnp.zeros_like(steps)
        if self.decay != "none":
            log_decay = -chunk.counted * jax.nn.softplus(steps + self.decay_bias)
        access = self._reads(chunk.query)
        written = DeltaTokens(
            write_ids=write_ids.reshape(tokens, -1),
            # Tokens without a weight, such as padding, write nothing, whatever their value is.
            write_weights=jnp.where(chunk.counted[:, None] > 0, write_weights, 0.0),
            read_ids=access.slot_ids,
            read_weights=access.slot_weights,
            values=jnp.where(chunk.counted[:, None] > 0, chunk.target, 0.0),
            log_decay=log_decay,
            strength=chunk.write_weight * jax.nn.sigmoid(logits + self.strength_bias),
        )
        return written, access

    def _reads(self, query: Queries) -> SlotAccess:
        slot_ids, scores = best_slots(_scores(query, self.num_subkeys)[1], self.num_reads)
        weights = slot_weights(scores, temperature=self.temperature).reshape(len(query), -1)
        if self.read_norm == "unit":
            weights = unit_normalize(weights)
        return SlotAccess(slot_ids.reshape(len(query), -1), weights)


def _under_previous(
    last: Float[Array, "heads scores"],
    query: Queries,
    counted: Float[Array, " tokens"],
    documents: tuple[Bool[Array, " tokens"], Float[Array, "heads scores"]] | None = None,
) -> tuple[Queries, Float[Array, "heads scores"]]:
    """Queries with the write scores of the token before, and those of the last token.

    Args:
      last: of the token before the first; padding is passed over.
      query: in the order in which the tokens write.
      counted: 0 for padding.
      documents: their first tokens, and the scores before each.
    """
    (_, scores), at = last.shape, 1 + jnp.arange(len(query), dtype=jnp.int32)
    newest = jnp.pad(jax.lax.cummax(jnp.where(counted > 0, at, 0)), (1, 0))
    found = jnp.concatenate([last[None], query[..., :scores]])[newest]
    if documents is not None:
        starts, fresh = documents
        begin = jax.lax.cummax(jnp.where(starts, at, 0))
        own = newest >= jnp.append(begin, begin[-1])
        found = jnp.where(own[:, None, None], found, fresh)
    return jnp.concatenate([found[:-1], query[..., scores:]], axis=-1), found[-1]


def _scores(
    query: Queries, num_subkeys: int
) -> tuple[Float[Array, "tokens heads 2 subkeys"], Float[Array, "tokens heads 2 subkeys"]]:
    """Scores of rows and columns: of the slots to write, and of those to read."""
    scores = query[..., : 4 * num_subkeys].reshape(*query.shape[:2], 2, 2, num_subkeys)
    return scores[:, :, 0], scores[:, :, 1]
