"""Whole sequences through a value table: groups, chunks and normalised steps for `value_scan`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.slots.values.exchange import ChunkRows, RowOps
from fwpkm_jax.core.slots.values.grouping import group_chunks, reference_counts
from fwpkm_jax.core.slots.values.scan import value_scan
from fwpkm_jax.core.slots.write import ValueWrite


class ValueRunOutput(NamedTuple):
    """The tables after the last chunk, what was read, and the norm of each chunk's change."""

    values: Any
    output: Float[Array, "groups batch length value"]
    update_norm: Float[Array, "groups chunks"]


def value_run(
    values: Float[Array, "groups slots value"],
    slot_ids: Int[Array, "groups batch length places"],
    weights: Float[Array, "groups batch length places"],
    targets: Float[Array, "groups batch length value"],
    *,
    error_weights: Float[Array, "groups batch length"],
    counted: Float[Array, "groups batch length *places"],
    write: ValueWrite,
    chunk_size: int,
    scales: Float[Array, "groups batch length places"] | None = None,
    inner_steps: int = 1,
    first: Float[Array, "groups batch length"] | None = None,
    ops: RowOps | None = None,
) -> ValueRunOutput:
    """Reads and writes sequences chunk by chunk, each group of them in a table of its own.

    Equal to `slot_read` and `slot_write` of each chunk in turn, gradients included. The groups'
    tables are laid end to end, so that one grouping and one write serve them all.

    Args:
      values: tables before the first token.
      slot_ids: slots that each token reads, below `slots`.
      weights: their read weights.
      targets: what each token should have read.
      error_weights: weight of each token's error in the write.
      counted: 1 for tokens, or single places of tokens, whose reads count in a slot's number of
        accesses.
      write: its formulas.
      chunk_size: tokens of a sequence between two writes; the last chunk may be shorter.
      scales: multiply the steps of each place; None: 1.
      inner_steps: how often each chunk is written in turn. Its output is what it read first, and
        the squares of its changes are added up.
      first: 1 for tokens that each inner step writes before the others, in a step of their own;
        None: all are written at once.
      ops: what reads and adds rows; None: plain XLA.
    """
    num_groups, batch, length = error_weights.shape
    num_slots = values.shape[1]
    chunk = min(chunk_size, length)
    chunks = -(-length // chunk)

    def to_chunks(x: jax.Array) -> jax.Array:
        """`[groups, batch, length, ...]` to `[chunks, groups * batch * chunk, ...]`.

        Tokens added behind the end read their table's first slot with weight 0 and do not count.
        """
        rest = x.shape[3:]
        x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * chunk - length)] + [(0, 0)] * len(rest))
        x = jnp.moveaxis(x.reshape(num_groups, batch, chunks, chunk, *rest), 2, 0)
        return x.reshape(chunks, num_groups * batch * chunk, *rest)

    # All tables are one, laid end to end: one sort groups the references of a chunk.
    offsets = num_slots * jnp.arange(num_groups, dtype=slot_ids.dtype)
    ids = to_chunks(slot_ids)
    ids = ids.reshape(chunks, num_groups, -1) + offsets[None, :, None]
    ids = ids.reshape(chunks, -1, slot_ids.shape[-1])
    groups = group_chunks(ids, num_slots=num_groups * num_slots)
    weights = to_chunks(weights)
    targets = to_chunks(targets)

    def step_of(share: jax.Array | None) -> ChunkRows:
        """What a step reads and writes that writes the tokens with a share of 1, or all."""
        own_counted, own_weights = counted, error_weights
        if share is not None:
            own_counted, own_weights = share * counted, share * error_weights
        counts = jax.vmap(reference_counts)(groups, to_chunks(own_counted))
        coefficients = write.steps(weights, counts)
        if scales is not None:
            coefficients = to_chunks(scales) * coefficients
        return ChunkRows(weights, coefficients, targets, error_weights=to_chunks(own_weights))

    steps = [step_of(None)] if first is None else [step_of(first), step_of(1.0 - first)]
    steps = steps * inner_steps
    rows = steps[0]
    if len(steps) > 1:  # To the scan, the next step is a chunk of the same tokens.
        ids, groups = jax.tree.map(lambda x: jnp.repeat(x, len(steps), axis=0), (ids, groups))
        rows = jax.tree.map(
            lambda *x: jnp.stack(x, axis=1).reshape(chunks * len(steps), *x[0].shape[1:]), *steps
        )
    table = values.reshape(num_groups * num_slots, values.shape[2])
    out = value_scan(table, ids, rows, groups=groups, write=write, ops=ops)
    output = out.output[:: len(steps)].reshape(chunks, num_groups, batch, chunk, values.shape[2])
    output = jnp.moveaxis(output, 0, 2).reshape(num_groups, batch, chunks * chunk, -1)
    change = out.squared_change.reshape(chunks, len(steps), num_groups, batch * chunk)
    change = change.sum((1, 3))
    return ValueRunOutput(
        out.values.reshape(values.shape), output[:, :, :length], jnp.sqrt(change.T)
    )
