"""The two phases of a memory of slots whose keys never read its values.

Such a memory is written in two phases, each over all chunks of whole sequences. Read downwards:

1. `move_keys`: a scan over the keys alone moves them and finds every token's best sub-keys.
   `find_slots` then pairs these to slots, all chunks at once: pairs move no keys.
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
from fwpkm_jax.core.slots.keys.addressing import SubKeyChoice
from fwpkm_jax.core.slots.keys.scan import Find, KeyLoops, key_scan
from fwpkm_jax.core.slots.values.exchange import ChunkRows, RowOps
from fwpkm_jax.core.slots.values.grouping import group_chunks, reference_counts
from fwpkm_jax.core.slots.values.scan import value_scan
from fwpkm_jax.core.slots.write import (
    KeyWrite,
    SlotAccess,
    SlotChunk,
    ValueWrite,
    sub_key_usage,
    usage_loss,
)


class MovedKeys(NamedTuple):
    """What the first phase leaves.

    Attributes:
      keys: after the last chunk.
      choices: the best sub-keys of each token, of the whole chunks and of a shorter last one;
        leaves `[groups, chunks, tokens, heads, 2, top_k]`.
      addressing_loss: of each chunk, before its write; without a gradient.
    """

    keys: Float[Array, "groups heads 2 subkeys half"]
    choices: tuple[SubKeyChoice, ...]
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
      sequence: leaves `[groups, batch, length, ...]`; this device's part. Its queries may be
        narrower than the keys, see `key_scan`.
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
    elif keys.shape[0] == 1:  # Under `vmap`, kernels would move one memory after the other.
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
        choices.append(choice)
    return MovedKeys(keys, tuple(choices), jax.lax.stop_gradient(jnp.concatenate(losses)))


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
        chunk = chunk._replace(query=chunk.query.astype(keys.dtype))
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
    # Sequences laid end to end, as one chunk.
    choice = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), choice)
    return MovedKeys(keys, (choice,), losses)


def find_slots(
    choices: tuple[SubKeyChoice, ...],
    *,
    batch: int,
    pair: Callable[[SubKeyChoice], SlotAccess],
) -> SlotAccess:
    """Between the phases: the slots of one memory's tokens, leaves `[batch, length, places]`.

    Pairs of sub-keys move no keys, so all chunks are paired at once.

    Args:
      choices: of one memory, from `move_keys`.
      batch: sequences.
      pair: from the best sub-keys of any number of tokens to their slots.
    """
    found = []
    for choice in choices:
        chunks, tokens = choice.sub_key_ids.shape[:2]
        access = pair(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), choice))
        access = jax.tree.map(lambda x, n=(chunks, tokens): x.reshape(*n, -1), access)
        found.append(jax.tree.map(lambda x: merge_chunks(x, batch), access))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *found)


class WrittenValues(NamedTuple):
    """The tables after the last chunk, what was read, and the norm of each chunk's change."""

    values: Float[Array, "groups slots value"]
    output: Float[Array, "groups batch length value"]
    update_norm: Float[Array, "groups chunks"]


def write_values(
    values: Float[Array, "groups slots value"],
    access: SlotAccess,
    targets: Float[Array, "groups batch length value"],
    *,
    error_weights: Float[Array, "groups batch length"],
    counted: Float[Array, "groups batch length *places"],
    chunk_size: int,
    write: ValueWrite,
    ops: RowOps,
    inner_steps: int = 1,
    scales: Float[Array, "groups batch length places"] | None = None,
    first: Float[Array, "groups batch length"] | None = None,
) -> WrittenValues:
    """The second phase: all chunks are read and written, each group in a table of its own.

    Equal to `slot_read` and `slot_write` of each chunk in turn, gradients included. The groups'
    tables are laid end to end, so that one grouping and one write serve them all.

    Args:
      values: tables before the first token.
      access: the slots that each token reads, leaves `[groups, batch, length, places]`.
      targets: what each token should have read.
      error_weights: weight of each token's error in the write.
      counted: 1 for tokens, or single places of tokens, whose reads count in a slot's number of
        accesses.
      chunk_size: tokens of a sequence between two writes; the last chunk may be shorter.
      write: how the values move.
      ops: what reads and adds rows.
      inner_steps: how often each chunk is written in turn. Its output is what it read first, and
        the squares of its changes are added up.
      scales: multiply the steps of each place; None: 1.
      first: 1 for tokens that each inner step writes before the others, in a step of their own;
        None: all are written at once.
    """
    slot_ids, weights = access
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
    return WrittenValues(
        out.values.reshape(values.shape), output[:, :, :length], jnp.sqrt(change.T)
    )
