"""The two phases of a memory of slots whose keys never read its values.

Such a memory is written in two phases, each over all chunks of whole sequences. Read downwards:

1. `move_keys`: a scan over the keys alone moves them and finds every token's best sub-keys.
   The rule then pairs these to slots, all chunks at once: pairs move no keys.
2. `write_values`: the values are read and written, the table in place.

Results and gradients are those of the rule's `step`, chunk by chunk. Rules whose keys learn from
the values, or whose writes go over all rows, scan their `step` with `core.chunks.scan_chunks`.
Options join from outside: scaled steps and tokens that are written again
(`core.slots.options.retention`, `replay`), tables that share a base (`overlay`), one chunk too long
to be formed at once (`blocks`), tables on several devices (`devices`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import SubKeys
from fwpkm_jax.core.slots.keys.addressing import SubKeyChoice
from fwpkm_jax.core.slots.keys.scan import Find, KeyLoops, key_scan
from fwpkm_jax.core.slots.values.exchange import ChunkRows, RowOps
from fwpkm_jax.core.slots.values.grouping import group_chunks, reference_counts
from fwpkm_jax.core.slots.values.scan import value_scan
from fwpkm_jax.core.slots.write import (
    KeyWrite,
    SlotAccess,
    ValueWrite,
    sub_key_usage,
    usage_loss,
)


class MovedKeys(NamedTuple):
    """What the first phase leaves of one memory.

    Attributes:
      keys: after the last chunk.
      choice: the best sub-keys of each token, leaves `[chunks, tokens, heads, 2, top_k]`.
      addressing_loss: of each chunk, before its write; without a gradient.
    """

    keys: SubKeys
    choice: SubKeyChoice
    addressing_loss: Float[Array, " chunks"]


def move_keys(
    keys: SubKeys,
    queries: Float[Array, "chunks tokens heads key"],
    token_weights: Float[Array, "chunks tokens"],
    *,
    find: Find,
    key_write: KeyWrite,
    loops: KeyLoops,
    token_axes: tuple[str, ...] = (),
) -> MovedKeys:
    """The first phase: the keys of one memory move chunk by chunk.

    Args:
      keys: before the first chunk.
      queries: of this device's tokens; kernels take them in bfloat16 too, see `key_scan`.
      token_weights: weight of each token in the addressing loss's average.
      find: from queries and keys to the best sub-keys of each query.
      loops: what goes over the chunks, on one device.
      token_axes: inside `jax.shard_map`, axes along which devices hold other tokens of each chunk.
        Each device then moves its own copy of the keys, all alike.

    Raises:
      ValueError: `key_write` clips, which the backward pass does not know.
    """
    if token_axes:
        return _move_with_other_devices(
            keys, queries, token_weights, find=find, key_write=key_write, token_axes=token_axes
        )
    if key_write.clip is not None:
        raise ValueError(f"clip={key_write.clip} of a key write needs a scan of steps; use None.")
    moved: Any = key_scan(keys, queries, token_weights, find, key_write, loops)
    # The losses of all chunks at once; the scan itself does not need them.
    usage = jax.vmap(functools.partial(sub_key_usage, num_subkeys=keys.shape[2]))
    loss = jax.vmap(usage_loss)(usage(moved.choice, token_weights=token_weights))
    return MovedKeys(moved.keys, moved.choice, jax.lax.stop_gradient(loss))


def _move_with_other_devices(
    keys: SubKeys,
    queries: Float[Array, "chunks tokens heads key"],
    token_weights: Float[Array, "chunks tokens"],
    *,
    find: Find,
    key_write: KeyWrite,
    token_axes: tuple[str, ...],
) -> MovedKeys:
    """One memory's keys where other devices hold other tokens of each chunk.

    The devices add up how all of them use and move the keys.
    """

    def move(keys: SubKeys, chunk: tuple[jax.Array, jax.Array]) -> tuple[SubKeys, tuple]:
        queries, weights = chunk
        queries = queries.astype(keys.dtype)
        choice = find(queries, keys)
        usage = sub_key_usage(choice, num_subkeys=keys.shape[2], token_weights=weights)
        # The loss is of all tokens of the chunk, and so are the sums in its gradient.
        usage = jax.lax.psum(usage, token_axes)
        gradient = key_write.gradient(keys, queries, choice, token_weights=weights, usage=usage)
        keys = key_write.step(keys, jax.lax.psum(gradient, token_axes))
        return keys, (choice, usage_loss(usage))

    keys, (choice, losses) = jax.lax.scan(move, keys, (queries, token_weights))
    return MovedKeys(keys, choice, losses)


class WrittenValues(NamedTuple):
    """The tables after the last chunk, what was read, and the norm of each chunk's change."""

    values: Any  # `[groups, slots, value]`: an array, or an overlay for an overlay.
    output: Float[Array, "groups chunks tokens value"]
    update_norm: Float[Array, "groups chunks"]


def write_values(
    values: Float[Array, "groups slots value"],
    access: SlotAccess,
    targets: Float[Array, "groups chunks tokens value"],
    *,
    error_weights: Float[Array, "groups chunks tokens"],
    counted: Float[Array, "groups chunks tokens *places"],
    write: ValueWrite,
    ops: RowOps,
    inner_steps: int = 1,
    scales: Float[Array, "groups chunks tokens places"] | None = None,
    first: Float[Array, "groups chunks tokens"] | None = None,
) -> WrittenValues:
    """The second phase: all chunks are read and written, each group in a table of its own.

    Equal to `slot_read` and `slot_write` of each chunk in turn, gradients included. The groups'
    tables are laid end to end, so that one grouping and one write serve them all.

    Args:
      values: tables before the first token.
      access: the slots that each token reads, leaves `[groups, chunks, tokens, places]`.
      targets: what each token should have read.
      error_weights: weight of each token's error in the write.
      counted: 1 for tokens, or single places of tokens, whose reads count in a slot's number of
        accesses.
      inner_steps: how often each chunk is written in turn. Its output is what it read first, and
        the squares of its changes are added up.
      scales: multiply the steps of each place; None: 1.
      first: 1 for tokens that each inner step writes before the others, in a step of their own;
        None: all are written at once.
    """
    num_groups, chunks, tokens, _ = access.slot_ids.shape
    num_slots = values.shape[1]

    def side_by_side(x: jax.Array) -> jax.Array:
        """`[groups, chunks, tokens, ...]` to `[chunks, groups * tokens, ...]`."""
        return x.swapaxes(0, 1).reshape(chunks, num_groups * tokens, *x.shape[3:])

    # All tables are one, laid end to end: one sort groups the references of a chunk.
    offsets = num_slots * jnp.arange(num_groups, dtype=access.slot_ids.dtype)
    ids = side_by_side(access.slot_ids + offsets[:, None, None, None])
    groups = group_chunks(ids, num_slots=num_groups * num_slots)
    weights = side_by_side(access.slot_weights)

    def step_of(share: jax.Array | float) -> ChunkRows:
        """What a step reads and writes that writes the tokens with a share of 1."""
        counts = jax.vmap(reference_counts)(groups, side_by_side(share * counted))
        steps = write.steps(weights, counts)
        if scales is not None:
            steps = side_by_side(scales) * steps
        return ChunkRows(weights, steps, side_by_side(targets), side_by_side(share * error_weights))

    parts = [step_of(1.0)] if first is None else [step_of(first), step_of(1.0 - first)]
    parts = parts * inner_steps
    rows = parts[0]
    if len(parts) > 1:  # To the scan, the next step is a chunk of the same tokens.
        ids, groups = jax.tree.map(lambda x: jnp.repeat(x, len(parts), axis=0), (ids, groups))
        rows = jax.tree.map(lambda *x: jnp.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *parts)
    # A reshape of leading axes copies nothing.
    table = values.reshape(num_groups * num_slots, -1)
    out: Any = value_scan(table, ids, rows, groups, write, ops)
    output = out.output[:: len(parts)].reshape(chunks, num_groups, tokens, -1).swapaxes(0, 1)
    change = out.squared_change.reshape(chunks, len(parts), num_groups, tokens).sum((1, 3))
    return WrittenValues(out.values.reshape(values.shape), output, jnp.sqrt(change.T))
