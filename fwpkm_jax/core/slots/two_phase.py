"""The two phases of a memory of slots whose keys never read its values.

Such a memory is written in two phases, each over all chunks of whole sequences. Read downwards:

1. `move_keys`: a scan over the keys alone moves them and finds every token's best sub-keys.
   (The rule then pairs these to slots, all tokens at once: pairs move no keys.)
2. `write_values`: the values are read and written, the table in place.

Results and gradients are those of the rule's `step`, chunk by chunk. Rules whose keys learn from
the values, or whose writes go over all rows, scan their `step` with `core.chunks.scan_chunks`.
Options join from outside: scaled steps and tokens that are written again
(`core.slots.options.retention`, `replay`), tables that share a base (`overlay`), one chunk too long
to be formed at once (`blocks`), tables on several devices (`devices`).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import SubKeys
from fwpkm_jax.core.chunks import (
    StepOutput,
    cut_chunks,
    map_groups,
    merge_chunks,
    scan_chunks,
    uncut,
)
from fwpkm_jax.core.slots.chunk import SlotAccess, SlotChunk
from fwpkm_jax.core.slots.keys.addressing import SubKeyChoice
from fwpkm_jax.core.slots.keys.scan import Find, KeyLoops, key_scan
from fwpkm_jax.core.slots.options.devices import MemoryAxes, split_value_run
from fwpkm_jax.core.slots.options.overlay import AnyTable, OverlayTable, open_groups
from fwpkm_jax.core.slots.values.exchange import RowOps
from fwpkm_jax.core.slots.values.run import ValueRunOutput, value_run
from fwpkm_jax.core.slots.write import KeyWrite, ValueWrite, sub_key_usage, usage_loss


class MovedKeys(NamedTuple):
    """What the first phase leaves.

    Attributes:
      keys: after the last chunk.
      choice: the best sub-keys of each token, leaves `[groups, batch, length, heads, 2, top_k]`.
      addressing_loss: of each chunk, before its write; without a gradient.
    """

    keys: Float[Array, "groups heads 2 subkeys half"]
    choice: SubKeyChoice
    addressing_loss: Float[Array, "groups chunks"]


def move_keys(
    keys: Float[Array, "groups heads 2 subkeys half"],
    sequence: SlotChunk,
    *,
    chunk_size: int,
    find: Find,
    key_write: KeyWrite,
    loops_of: Callable[[SubKeys, jax.Array], KeyLoops] | None = None,
    token_axes: tuple[str, ...] = (),
) -> MovedKeys:
    """The first phase: the keys of several memories move chunk by chunk.

    Args:
      keys: before the first chunk.
      sequence: leaves `[groups, batch, length, ...]`; this device's part.
      chunk_size: tokens of a sequence between two writes.
      find: from queries and keys to the best sub-keys of each query.
      key_write: how the keys move.
      loops_of: from keys and queries `[chunks, tokens, heads, key]` of one memory to what goes over
        its chunks; None: plain XLA.
      token_axes: inside `jax.shard_map`, axes along which devices hold other tokens of each chunk.
        Each device then moves its own copy of the keys, all alike.
    """
    move = functools.partial(_move_keys, chunk_size=chunk_size, find=find, key_write=key_write)
    if token_axes:
        move = functools.partial(
            _move_shared_keys,
            chunk_size=chunk_size,
            find=find,
            key_write=key_write,
            token_axes=token_axes,
        )
    elif keys.shape[0] == 1:  # Kernels update the keys in place, which `vmap` does not allow.
        move = functools.partial(move, loops_of=loops_of)
    return map_groups(move, keys, sequence)


def _move_keys(
    keys: SubKeys,
    sequence: SlotChunk,
    *,
    chunk_size: int,
    find: Find,
    key_write: KeyWrite,
    loops_of: Callable[[SubKeys, jax.Array], KeyLoops] | None = None,
) -> MovedKeys:
    """`move_keys` of one memory, its leaves without the axis of groups."""
    batch = sequence.query.shape[0]
    uncut(sequence, chunk_size)
    whole, rest = cut_chunks((sequence.query, sequence.addressed), chunk_size)
    if rest is not None:  # The shorter last chunk is a scan of its own.
        rest = jax.tree.map(lambda x: x[None], rest)
    choices, losses = [], []
    for queries, weights in (part for part in (whole, rest) if part is not None):
        loops = None if loops_of is None else loops_of(keys, queries)
        keys, choice = key_scan(keys, queries, weights, find=find, key_write=key_write, loops=loops)
        usage = jax.vmap(functools.partial(sub_key_usage, num_subkeys=keys.shape[2]))
        losses.append(jax.vmap(usage_loss)(usage(choice, token_weights=weights)))
        choices.append(jax.tree.map(lambda x: merge_chunks(x, batch), choice))
    choice = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *choices)
    return MovedKeys(keys, choice, jax.lax.stop_gradient(jnp.concatenate(losses)))


def _move_shared_keys(
    keys: SubKeys,
    sequence: SlotChunk,
    *,
    chunk_size: int,
    find: Find,
    key_write: KeyWrite,
    token_axes: tuple[str, ...],
) -> MovedKeys:
    """`_move_keys` where other devices hold other tokens of each chunk.

    The devices add up how all of them use and move the keys.
    """

    def move(keys: SubKeys, chunk: SlotChunk) -> StepOutput:
        choice = find(chunk.query, keys)
        options = {"num_subkeys": keys.shape[2], "token_weights": chunk.addressed}
        usage = jax.lax.psum(sub_key_usage(choice, **options), token_axes)
        gradient = key_write.gradient(
            keys, chunk.query, choice, token_weights=chunk.addressed, usage=usage
        )
        keys = key_write.step(keys, jax.lax.psum(gradient, token_axes))
        nothing_read = jnp.zeros((chunk.query.shape[0], 0), keys.dtype)
        return StepOutput(keys, nothing_read, choice, usage_loss(usage))

    keys, _, choice, losses = scan_chunks(move, keys, sequence, chunk_size=chunk_size)
    return MovedKeys(keys, choice, losses)


def write_values(
    values: AnyTable,
    access: SlotAccess,
    sequence: SlotChunk,
    *,
    chunk_size: int,
    write: ValueWrite,
    ops: RowOps,
    inner_steps: int = 1,
    scales: Float[Array, "groups batch length places"] | None = None,
    first: Float[Array, "groups batch length"] | None = None,
    axes: MemoryAxes | None = None,
) -> ValueRunOutput:
    """The second phase: all chunks are read and written, chunk by chunk.

    Args:
      values: before the first chunk, `[groups, slots, value]`; this device's part.
      access: the slots that each token reads, leaves `[groups, batch, length, places]`.
      sequence: leaves `[groups, batch, length, ...]`; this device's part.
      chunk_size: tokens of a sequence between two writes.
      write: how the values move.
      ops: what reads and adds rows.
      inner_steps, scales, first: see `values.run.value_run`; for tables on one device.
      axes: inside `jax.shard_map`, how devices share each table; None: they do not.
    """
    tokens = {"error_weights": sequence.error_weight, "counted": sequence.counted}
    sizes = {"write": write, "chunk_size": chunk_size, "ops": ops}
    if axes is not None:
        assert not isinstance(values, OverlayTable)  # The layer refuses one on a mesh.
        return split_value_run(values, *access, sequence.target, **tokens, **sizes, axes=axes)
    options = {"inner_steps": inner_steps, "scales": scales, "first": first}
    if not isinstance(values, OverlayTable):
        return value_run(values, *access, sequence.target, **tokens, **sizes, **options)
    # Every slot of the chunks gets a row of its own; these rows are the table that is written.
    opened = open_groups(values, access.slot_ids, sequence.counted)
    assert isinstance(opened.values, OverlayTable)
    weights = access.slot_weights
    out = value_run(
        opened.rows, opened.slot_ids, weights, sequence.target, **tokens, **sizes, **options
    )
    return out._replace(values=opened.values._replace(rows=out.values))
