"""Sparse Delta Memory over whole sequences, a chunk of tokens at a time.

Slots and weights do not depend on the table. So what the tokens of a chunk do to each other is
known beforehand, in a first phase over all chunks (`relate`), and a scan over the table needs
no loop over tokens (`_value_scan`). Per chunk, with the table M as earlier chunks left it and
D[u, t] the decay of a slot from after the write of token u to after the decay of token t:

    A[t, u] = sum over slots of k[t] D[u, t] k[u]      u < t
    B[t, u] = sum over slots of q[t] D[u, t] k[u]      u <= t
    e = b (v - k D M - A e)                            a triangular system
    y = q D M + B e                                    reads, each after its own write
    M <- D M + sum over tokens of k D e

Each `D` is the exponential of a sum of decays, in which nothing cancels and nothing overflows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.chunks import from_chunks, to_chunks
from fwpkm_jax.core.platform import platform
from fwpkm_jax.core.recurrence.triangular import unit_lower_inverse
from fwpkm_jax.core.slots.delta.definition import Decay, DeltaOutput, DeltaTokens
from fwpkm_jax.core.slots.values.exchange import PLAIN_SUMS, RowSums, logged_rows
from fwpkm_jax.core.slots.values.grouping import SlotGroups, group_chunks
from fwpkm_jax.core.slots.values.rows import add_by_blocks
from fwpkm_jax.core.slots.values.scan import next_rows_of

_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def sparse_delta(
    tables: Float[Array, "groups slots value"],
    tokens: DeltaTokens,
    *,
    decay: Decay = "slot",
    chunk_size: int = 64,
    sums: RowSums = PLAIN_SUMS,
) -> DeltaOutput:
    """`definition.write_and_read` of several memories side by side.

    The tables are updated in place. The backward pass keeps the touched rows from before each
    chunk. A gradient of whole tables is computed only where it is used.

    Args:
      tables: before the first token, `[groups, slots, value]`.
      tokens: of each memory, leaves `[groups, tokens, ...]`.
      decay: of written slots.
      chunk_size: tokens computed at once; changes speed, and results by rounding only.
      sums: what reads, multiplies and adds to rows; kernels can replace it.

    Returns:
      The tables, and what each token read, `[groups, tokens, value]`.
    """
    num_groups, num_slots, width = tables.shape
    length = tokens.log_decay.shape[1]
    # Tokens of weight 0 fill up the last chunk: they change nothing.
    chunks: Any = jax.tree.map(lambda x: to_chunks(x[:, None], chunk_size).swapaxes(0, 1), tokens)
    # The tables are one, laid end to end: one sort groups the references of a chunk.
    offsets = num_slots * jnp.arange(num_groups, dtype=chunks.write_ids.dtype)[:, None, None]
    ids = jnp.concatenate([chunks.write_ids, chunks.read_ids], axis=-1) + offsets[None]
    number, _, size, places = ids.shape
    groups = group_chunks(
        ids.reshape(number, num_groups * size, places), num_slots=num_groups * num_slots
    )
    distinct = logged_rows(num_groups * num_slots, groups)
    phase = functools.partial(relate, distinct=distinct, decay=decay)
    relations = jax.lax.map(
        lambda x: jax.checkpoint(phase)(*x),
        (groups.rank, *(chunks.write_weights, chunks.read_weights, chunks.log_decay)),
    )
    flat = tables.reshape(num_groups * num_slots, width)
    scanned: Any = _value_scan(flat, relations, chunks.values, chunks.strength, groups, sums)
    table, output = scanned
    output = from_chunks(output.swapaxes(0, 1), 1, length)[:, 0]
    return DeltaOutput(table.reshape(tables.shape), output)


class Relations(NamedTuple):
    """What the tokens of a chunk do to each other and to the rows that they touch.

    Attributes:
      found: k and q times the decay from before the chunk, of each place that is written or read.
      left: k times the decay to the end of the chunk, of each place that is written.
      kept: of each touched row, its decay over the chunk.
      corrected: A, below the diagonal.
      seen: B, on and below the diagonal.
    """

    found: Float[Array, "*chunks groups tokens places"]
    left: Float[Array, "*chunks groups tokens writes"]
    kept: Float[Array, "*chunks distinct"]
    corrected: Float[Array, "*chunks groups tokens tokens"]
    seen: Float[Array, "*chunks groups tokens tokens"]


def relate(
    rank: Int[Array, "groups_tokens places"],
    write_weights: Float[Array, "groups tokens writes"],
    read_weights: Float[Array, "groups tokens reads"],
    log_decay: Float[Array, "groups tokens"],
    *,
    distinct: int,
    decay: Decay,
) -> Relations:
    """The first phase of one chunk; `rank` numbers the rows that all groups touch."""
    num_groups, size, writes = write_weights.shape
    rank = rank.reshape(num_groups, size, -1)
    # Rows belong to one group each, so a row has one number for each token of a group.
    token = jnp.arange(size)
    at = rank[..., :writes], token[None, :, None]
    zeros = jnp.zeros((distinct, size), log_decay.dtype)
    weights = zeros.at[at].add(write_weights)
    share = weights if decay == "weighted" else zeros.at[at].set(1.0)
    # From a touched row to the decays of its group, `[groups, tokens, places, tokens]` at places.
    by_place = share[rank] * log_decay[:, None, None, :]
    group = jnp.zeros((distinct,), jnp.int32)
    group = group.at[rank].set(jnp.arange(num_groups, dtype=jnp.int32)[:, None, None])
    kept = jnp.exp(jnp.sum(share * log_decay[group], axis=1))

    before = (token[None, :] <= token[:, None])[None, :, None]  # [1, tokens, 1, tokens]
    so_far = jnp.where(before, by_place, 0.0)
    found = jnp.concatenate([write_weights, read_weights], axis=-1)
    # Sums of what lies between two tokens: from after the one to the other's own decay.
    between = jax.lax.cumsum(so_far, axis=3, reverse=True) - so_far
    pairs = jnp.where(before, jnp.exp(between), 0.0) * weights[rank] * found[..., None]
    later = jnp.where(before, 0.0, by_place)[:, :, :writes]
    return Relations(
        found=found * jnp.exp(jnp.sum(so_far, axis=3)),
        left=write_weights * jnp.exp(jnp.sum(later, axis=3)),
        kept=kept,
        corrected=jnp.tril(jnp.sum(pairs[:, :, :writes], axis=2), -1),
        seen=jnp.sum(pairs[:, :, writes:], axis=2),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _value_scan(
    table: Float[Array, "slots value"],
    relations: Relations,
    values: Float[Array, "chunks groups tokens value"],
    strength: Float[Array, "chunks groups tokens"],
    groups: SlotGroups,
    sums: RowSums,
) -> tuple[Float[Array, "slots value"], Float[Array, "chunks groups tokens value"]]:
    """The second phase: the table after all chunks, and what each token read."""
    return _scan_and_log(sums, table, relations, values, strength, groups)[0]


def _scan_and_log(sums, table, relations, values, strength, groups):
    """The scan, the touched rows before each chunk, and what it leaves of each token's error."""
    distinct = logged_rows(len(table), groups)

    def body(table, chunk):
        of_rows, values, strength, groups = chunk
        slots, (writes, reads) = groups.slots[:distinct], _parts(of_rows)
        # Clipped: entries behind the last distinct slot lie outside the table and are never read.
        before = table.at[slots].get(mode="clip")
        found = _flat(of_rows.found)
        old = sums.read(before, groups.rank[:, writes], found[:, writes]).reshape(values.shape)
        read = sums.read(before, groups.rank[:, reads], found[:, reads]).reshape(values.shape)
        # e = b u with u = v - old - A e, so that (I + A b) u = v - old.
        inverse = unit_lower_inverse(of_rows.corrected * strength[:, None, :])
        error = _product("gtu,guv->gtv", inverse, values - old)
        change = strength[..., None] * error
        output = read + _product("gtu,guv->gtv", of_rows.seen, change)
        after = of_rows.kept[:, None] * before
        after = _add(sums, after, groups, writes, of_rows.left, change)
        # The table is written after every read of it, so that XLA changes it in place.
        table = table.at[slots].set(
            after, mode="drop", unique_indices=True, indices_are_sorted=True
        )
        return table, (output, before, error)

    table, (output, log, errors) = jax.lax.scan(body, table, (relations, values, strength, groups))
    return (table, output), (log, errors)


class _Residuals(NamedTuple):
    log: Float[Array, "chunks distinct value"]
    errors: Float[Array, "chunks groups tokens value"]
    relations: Relations
    strength: Float[Array, "chunks groups tokens"]
    groups: SlotGroups
    slots: Float[Array, "slots 0"]  # For the number of slots.
    table: Float[Array, ""] | None  # An array only if the gradient of the table is used.


def _scan_forward(table, relations, values, strength, groups, sums):
    asked = table.perturbed
    arguments = jax.tree.map(lambda x: x.value, (table, relations, values, strength, groups))
    out, (log, errors) = _scan_and_log(sums, *arguments)
    table, relations, _, strength, groups = arguments
    slots = jnp.zeros((table.shape[0], 0), table.dtype)
    asked = jnp.zeros((), table.dtype) if asked else None
    return out, _Residuals(log, errors, relations, strength, groups, slots, asked)


def _scan_backward(sums, residuals, cotangents):
    """Goes from the last chunk to the first; each puts the cotangents of its rows into the log.

    As in `core.slots.values.scan`: a row's cotangent after a chunk is that of the same slot's row
    in the next chunk that touches it, so no table is needed.
    """
    log, errors, relations, strength, groups, slots, asked = residuals
    table_bar, output_bar = cotangents
    if isinstance(output_bar, SymbolicZero):
        output_bar = jnp.zeros_like(errors)
    number, distinct, width = log.shape
    num_slots, end = slots.shape[0], number * distinct
    # Behind the log stand the rows that no later chunk touches: one of zeros, or the whole table's
    # cotangents.
    if isinstance(table_bar, SymbolicZero):
        table_bar = jnp.zeros((1, width), log.dtype)
        untouched = jnp.full((num_slots,), end, jnp.int32)
    else:
        untouched = end + jnp.arange(num_slots, dtype=jnp.int32)
    touched = groups.slots[:, :distinct]
    next_rows = next_rows_of(touched, untouched)

    def body(log, chunk):
        index, next_rows, of_rows, strength, groups, error, output_bar = chunk
        before = jax.lax.dynamic_slice_in_dim(log, index * distinct, distinct)
        after_bar = log.at[next_rows].get(mode="promise_in_bounds")
        back = _chunk_back(sums, before, after_bar, of_rows, strength, groups, error, output_bar)
        log = jax.lax.dynamic_update_slice_in_dim(log, back[0], index * distinct, axis=0)
        return log, back[1:]

    log = jnp.concatenate([log.reshape(end, width), table_bar])
    chunks = jnp.arange(number, dtype=jnp.int32), next_rows
    chunks += (relations, strength, groups, errors, output_bar)
    log, (relations_bar, values_bar, strength_bar) = jax.lax.scan(body, log, chunks, reverse=True)
    table_bar = None
    if asked is not None:
        places = jnp.arange(end, dtype=jnp.int32)
        # The earliest row of a slot holds its cotangent before the first chunk.
        first = untouched.at[touched.reshape(-1)].min(places, mode="drop")
        table_bar = log.at[first].get(mode="promise_in_bounds")
    return table_bar, relations_bar, values_bar, strength_bar, None


def _chunk_back(sums, before, after_bar, of_rows, strength, groups, error, output_bar):
    """The cotangents of one chunk: of the rows before it, relations, values and strengths."""
    writes, reads = _parts(of_rows)
    rank, found = groups.rank, _flat(of_rows.found)
    change = strength[..., None] * error
    # M after the chunk = kept M + left e.
    change_bar, left_bar = sums.read_and_dot(
        after_bar, rank[:, writes], _flat(of_rows.left), _flat(change)
    )
    # y = found M + B e.
    seen_bar = _product("gtv,guv->gtu", output_bar, change)
    change_bar = change_bar.reshape(error.shape)
    change_bar = change_bar + _product("gtu,gtv->guv", of_rows.seen, output_bar)
    # e = b u and u = (I + A b)^-1 (v - found M).
    inverse = unit_lower_inverse(of_rows.corrected * strength[:, None, :])
    values_bar = _product("gtu,gtv->guv", inverse, strength[..., None] * change_bar)
    pairs_bar = -jnp.tril(_product("gtv,guv->gtu", values_bar, error), -1)  # Of A b.
    strength_bar = jnp.sum(change_bar * error, axis=-1)
    strength_bar = strength_bar + jnp.sum(pairs_bar * of_rows.corrected, axis=1)
    found_bar = jnp.concatenate(
        [
            sums.dot(before, rank[:, writes], -_flat(values_bar)),
            sums.dot(before, rank[:, reads], _flat(output_bar)),
        ],
        axis=-1,
    )
    relations_bar = Relations(
        found=found_bar.reshape(of_rows.found.shape),
        left=left_bar.reshape(of_rows.left.shape),
        kept=jnp.sum(before * after_bar, axis=-1),
        corrected=pairs_bar * strength[:, None, :],
        seen=seen_bar,
    )
    before_bar = of_rows.kept[:, None] * after_bar
    before_bar = _add(sums, before_bar, groups, writes, found[:, writes], -values_bar)
    before_bar = _add(sums, before_bar, groups, reads, found[:, reads], output_bar)
    return before_bar, relations_bar, values_bar, strength_bar


_value_scan.defvjp(_scan_forward, _scan_backward, symbolic_zeros=True)


def _add(sums, rows, groups, part, coefficients, vectors):
    """Adds a multiple of each token's vector to the rows of some of its places."""
    coefficients, vectors = _flat(coefficients), _flat(vectors)
    if platform() == "cpu" and sums is PLAIN_SUMS:
        return add_by_blocks(rows, groups.rank[:, part], coefficients, vectors)
    everywhere = jnp.zeros(groups.rank.shape, rows.dtype).at[:, part].set(coefficients)
    # The rows are a small table, whose slots are the ranks.
    own = groups._replace(slots=jnp.arange(groups.slots.shape[0], dtype=jnp.int32))
    return sums.add(rows, own, everywhere, vectors)


def _parts(relations):
    """The places that are written, and those that are read."""
    writes = relations.left.shape[-1]
    return slice(0, writes), slice(writes, None)


def _flat(x):
    """`[groups, tokens, ...]` as `[groups * tokens, ...]`, if it is not yet."""
    return x.reshape(-1, x.shape[-1])
