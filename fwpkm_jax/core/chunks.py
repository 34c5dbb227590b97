"""Sequences cut into chunks, and a memory carried over the chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

Memory: TypeAlias = PyTree[Array]
"""The fast weights of a rule: any pytree of arrays."""

AnyChunk: TypeAlias = PyTree[Array]
"""A `Chunk`, or a rule's own NamedTuple that has the fields of `Chunk` and more."""

T = TypeVar("T")


class Shared(NamedTuple):
    """An array in a memory that all groups share: without their axis, and no write changes it."""

    array: Array


@jax.tree_util.register_static
@dataclass(frozen=True)
class _TakenOut:
    """Stands for a `Shared` array that goes its own way, see `take_shared`."""


def take_shared(tree: Any) -> tuple[Any, list[Shared]]:
    """The tree without what groups share, and that; `put_shared` puts it back."""
    shared = [x for x in jax.tree.leaves(tree, is_leaf=_is_shared) if _is_shared(x)]
    taken_out = _TakenOut()
    own = jax.tree.map(lambda x: taken_out if _is_shared(x) else x, tree, is_leaf=_is_shared)
    return own, shared


def put_shared(tree: Any, shared: Sequence[Shared]) -> Any:
    """The tree with what `take_shared` took out of one like it."""
    back = iter(shared)

    def is_taken_out(x: Any) -> bool:
        return isinstance(x, _TakenOut)

    return jax.tree.map(lambda x: next(back) if is_taken_out(x) else x, tree, is_leaf=is_taken_out)


def map_unshared(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`jax.tree.map` that leaves what groups share as it stands in the last tree."""
    return jax.tree.map(
        lambda *x: x[-1] if isinstance(x[-1], Shared) else function(*x),
        tree,
        *others,
        is_leaf=_is_shared,
    )


def shares(memory: Any) -> bool:
    """Whether the groups of a memory share a part of it."""
    return any(map(_is_shared, jax.tree.leaves(memory, is_leaf=_is_shared)))


def _is_shared(x: Any) -> bool:
    return isinstance(x, Shared)


@jax.tree_util.register_static
@dataclass(frozen=True)
class ChunkSizeTag:
    """The chunk size that a sequence was made for: static, part of the pytree's structure."""

    chunk_size: int


class Chunk(NamedTuple):
    """What a memory reads and writes between two updates: the fields that every rule needs.

    The same fields serve a whole sequence, then called `sequence`: leaves `[batch, length, ...]`
    where a chunk has `[tokens, ...]`. A rule that needs more about each token has a NamedTuple of
    its own, with these fields first.

    Attributes:
      query: `[tokens, heads, key]`, what to read.
      target: `[tokens, value]`, what the read should have been.
      write_weight: `[tokens]`, weight of the token's squared error; 0 writes nothing.
      paired: `[tokens]`, 1 where the token has a target in its chunk.
      counted: `[tokens]`, 1 for real tokens, 0 for padding.
      cut: of a sequence, the chunks that its weights were made for; `scan_chunks` refuses others.
        None: any. A rule's own type may have this field too.
    """

    query: jax.Array
    target: jax.Array
    write_weight: jax.Array
    paired: jax.Array
    counted: jax.Array
    cut: ChunkSizeTag | None = None


def cast(tree: T, dtype: DTypeLike) -> T:
    """The tree with every array in `dtype`. A rule casts a chunk to its memory's dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


class StepOutput(NamedTuple):
    """The result of one chunk.

    Attributes:
      memory: after the write.
      output: `[tokens, value]`, read before the write unless the rule says otherwise.
      access: per-token facts of the read, leaves `[tokens, ...]`, or None.
      info: per-chunk measures of the write, scalar leaves.
    """

    memory: Memory
    output: jax.Array
    access: Any
    info: Any


class RunOutput(NamedTuple):
    """The result of a whole sequence: `StepOutput` with leaves `[batch, length, ...]`, and `info`
    with leaves `[num_chunks]`."""

    memory: Memory
    output: jax.Array
    access: Any
    info: Any


def scan_chunks(
    step: Callable[[Memory, AnyChunk], StepOutput],
    memory: Memory,
    sequence: AnyChunk,
    *,
    chunk_size: int,
) -> RunOutput:
    """Runs `step` over the chunks of a sequence, memory in and memory out.

    Args:
      step: from memory and one chunk to a `StepOutput`.
      memory: fast weights before the first chunk.
      sequence: any pytree, leaves `[batch, length, ...]`; a chunk merges batch and time into
        tokens.
      chunk_size: tokens of a sequence per chunk; the last chunk may be shorter.

    Raises:
      ValueError: `chunk_size` is below 1 or not the one that the sequence was made for, or the
        sequence is empty.
    """
    sequence = strip_chunk_size(sequence, chunk_size)
    batch, length = jax.tree.leaves(sequence)[0].shape[:2]
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1.")
    if length < 1:
        raise ValueError("A sequence needs at least one token, got length 0.")
    full = length // chunk_size * chunk_size
    pieces = []
    if full:
        whole = jax.tree.map(lambda x: to_chunks(x[None, :, :full], chunk_size)[0], sequence)

        def body(memory: Memory, chunk: AnyChunk) -> tuple[Memory, tuple]:
            memory, *rest = step(memory, chunk)
            return memory, tuple(rest)

        memory, of_chunks = jax.lax.scan(body, memory, whole)
        pieces.append(of_chunks)
    if full < length:
        # Not filled up: what a rule measures of a chunk may count its tokens.
        last = jax.tree.map(lambda x: merge_groups(x[:, full:]), sequence)
        memory, *of_last = step(memory, last)
        pieces.append(jax.tree.map(lambda x: x[None], tuple(of_last)))
    by_tokens = [
        jax.tree.map(lambda x: from_chunks(x[None], batch, length)[0], (output, access))
        for output, access, _ in pieces
    ]
    infos = [info for *_, info in pieces]
    # Without a short chunk, nothing is copied together.
    if len(pieces) == 1:
        output, access = by_tokens[0]
        return RunOutput(memory, output, access, infos[0])
    output, access = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *by_tokens)
    return RunOutput(memory, output, access, jax.tree.map(lambda *x: jnp.concatenate(x), *infos))


def check_chunk_size(sequence: Any, chunk_size: int) -> None:
    """Refuses a chunk size other than the one that the sequence was made for.

    Raises:
      ValueError: pairs of tokens would cross chunk ends.
    """
    cut = getattr(sequence, "cut", None)
    if cut is not None and cut.chunk_size != chunk_size:
        raise ValueError(
            f"chunk_size={chunk_size}, but the sequence was made with "
            f"sequence(chunk_size={cut.chunk_size}), so that its pairs end with other chunks; "
            "give both the same."
        )


def strip_chunk_size(sequence: T, chunk_size: int) -> T:
    """The sequence without its `cut`, once `check_chunk_size` lets it pass."""
    check_chunk_size(sequence, chunk_size)
    made: Any = sequence
    return sequence if getattr(made, "cut", None) is None else made._replace(cut=None)


def to_chunks(x: jax.Array, chunk_size: int) -> jax.Array:
    """`[groups, batch, length, ...]` as `[groups, chunks, tokens, ...]`.

    A chunk joins its part of all sequences of a group. Zeros fill the last one up: tokens that
    count nowhere and write nothing.
    """
    groups, batch, length, *rest = x.shape
    chunk = min(chunk_size, length)
    chunks = -(-length // chunk)
    # A padded token has no weight anywhere, so a short last chunk needs no program of its own.
    x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * chunk - length)] + [(0, 0)] * len(rest))
    # Sequences lie one after the other within a chunk, as `mix_rms_norm` expects their reads.
    x = x.reshape(groups, batch, chunks, chunk, *rest).swapaxes(1, 2)
    return x.reshape(groups, chunks, batch * chunk, *rest)


def from_chunks(x: jax.Array, batch: int, length: int) -> jax.Array:
    """The way back of `to_chunks`."""
    groups, chunks, tokens, *rest = x.shape
    x = x.reshape(groups, chunks, batch, tokens // batch, *rest).swapaxes(1, 2)
    return x.reshape(groups, batch, -1, *rest)[:, :, :length]


def map_groups(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` for every memory group, side by side.

    Args:
      function: takes one group's arrays, without the leading axis.
      *args: pytrees of arrays, leaves `[groups, ...]`.
    """
    if jax.tree.leaves(args)[0].shape[0] == 1:
        # A single memory needs no vmap; XLA then keeps the scatter in place.
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))
    return jax.vmap(function)(*args)


def map_memories(function: Callable[..., Any], memory: Memory, *args: Any) -> Any:
    """`map_groups` of memories that may have a `Shared` part, which has no axis of groups."""
    _, shared = take_shared(memory)

    def own_part(*args: Any) -> Any:
        return take_shared(function(*args))[0]

    if not shared:
        return map_groups(function, memory, *args)
    if jax.tree.leaves(take_shared(memory)[0])[0].shape[0] == 1:
        squeezed = map_unshared(lambda x: x[0], (memory, *args))
        return map_unshared(lambda x: x[None], function(*squeezed))
    # What is shared comes back from outside: as a result of vmap it would be copied per group.
    axes = jax.tree.map(lambda x: None if _is_shared(x) else 0, (memory, *args), is_leaf=_is_shared)
    return put_shared(jax.vmap(own_part, in_axes=axes)(memory, *args), shared)


def split_groups(x: jax.Array, groups: int) -> jax.Array:
    """`[batch, ...]` to `[groups, batch // groups, ...]`: neighbours share a memory.

    Raises:
      ValueError: the batch is not divisible by the groups.
    """
    batch = x.shape[0]
    if batch % groups:
        raise ValueError(
            f"A batch of {batch} sequences does not divide into {groups} memory groups; choose a "
            "divisor of the batch."
        )
    # A reshape moves no data: neighbours in the batch share a memory.
    return x.reshape(groups, batch // groups, *x.shape[1:])


def merge_groups(x: jax.Array) -> jax.Array:
    """`[groups, batch // groups, ...]` back to `[batch, ...]`."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
