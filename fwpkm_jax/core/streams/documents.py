"""Rows of several documents, for memories whose chunks count from each document's first token.

A unit is a chunk of one document. Units are read one after the other in one scan, which is at most
about twice as long as that of one document. If a row has more units, its documents of one unit are
read side by side, a few at a time: each starts from the initial state, and no other token reads the
state after it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from fwpkm_jax.core.documents import document_numbers, document_positions
from fwpkm_jax.core.streams.cuts import Within, joined, select, take_tokens, unchanged

State = TypeVar("State")
_BESIDE, _STEPS = 4, 16  # Short documents read side by side, and such steps passed over at once.


class Units(NamedTuple):
    """Some units of each row, in order, `[groups, units]`; those behind the last have no tokens.

    Attributes:
      start: first token.
      size: tokens.
      fresh: whether the unit is its document's first.
    """

    start: Int[Array, "groups units"]
    size: Int[Array, "groups units"]
    fresh: Bool[Array, "groups units"]


class UnitSize(NamedTuple):
    """How many tokens make a unit.

    Attributes:
      chunk: tokens of a unit.
      lead: by how many tokens a document's first unit is longer than the others, or below 0
        shorter, then by less than a chunk.
      narrow: units of at most so many tokens are given to `within` as pieces of this length, for a
        `within` whose cost grows with the length of the piece; it is compiled once more. None: all
        pieces are as long as a chunk.
    """

    chunk: int
    lead: int = 0
    narrow: int | None = None


def in_documents(
    within: Within[State],
    state: State,
    fresh: State,
    tokens: PyTree[Array],
    *,
    count: Int[Array, " groups"],
    starts: Bool[Array, "groups length"],
    unit: UnitSize,
    position: Int[Array, " groups"] | None = None,
    alone: Callable[[Any], Any] | None = None,
) -> tuple[State, PyTree[Array]]:
    """`core.streams.cuts.in_chunks` of rows that hold several documents; differentiable.

    A backward pass computes each unit again.

    Args:
      within: takes tokens of one unit.
      state: before the first token, leaves `[groups, ...]`.
      fresh: before each document, like `memory`.
      tokens: leaves `[groups, members, length, ...]`.
      count: how many of the tokens each group has, its first ones.
      unit: how many tokens make a unit.
      position: tokens of each group's document before the first token, less `unit.lead`, for a
        piece of a stream; None: the first token starts a document.
      alone: from tokens of documents that `within` would read in one call from `fresh` to their
        outputs; it sees all tokens of the rows. None: `within` reads them.

    Returns:
      The state after each group's last token, and the outputs, leaves
      `[groups, members, length, ...]`. Those behind a group's last token have no meaning, except
      that `alone` gives them, too.
    """
    chunk, lead, narrow = unit
    groups, length = starts.shape
    at = jnp.arange(length, dtype=jnp.int32)[None]
    if position is None:
        starts, position = starts.at[:, 0].set(True), jnp.zeros((groups,), jnp.int32)
    # Behind the last real token nothing starts.
    starts = starts & (at < count[:, None])
    number = document_numbers(starts)
    place = document_positions(starts, first=position) - jnp.where(number > 0, lead, 0)
    first = ((place > 0) & (place % chunk == 0)) | starts | (at == 0)
    end = jnp.minimum(_next(starts), count[:, None])  # Of each token's document.
    size = jnp.minimum(chunk - jnp.where(place < 0, place, place % chunk), end - at)
    goes_on = (number == 0) | (number == number[:, -1:]) | (end - at + place > chunk)
    first, goes_on = first & (at < count[:, None]), goes_on & (at < count[:, None])

    # A document of more than a unit has fewer than twice as many units as it fills.
    most = min(2 * (length // (chunk + min(lead, 0))) + 4, length)
    if alone is None:
        goes_on |= jnp.sum(first, axis=1, keepdims=True) <= most
    units = _units(first & goes_on, size, starts, most)

    width = min(chunk + max(lead, 0), length)

    @jax.checkpoint
    def read(state: State, part: tuple[Units, Any]) -> tuple[State, Any]:
        one, piece = part
        state = select(one.fresh, fresh, state)
        return _if_any(within, state, piece, one.size, narrow=narrow)

    # All units' tokens at once, so that no step of the backward pass adds to whole rows.
    pieces = jax.tree.map(lambda x: _pieces(x, units.start, width), tokens)
    in_turn = jax.tree.map(lambda x: x.swapaxes(0, 1), units)
    state, out = jax.lax.scan(read, state, (in_turn, pieces))
    rank = jnp.cumsum(first & goes_on, axis=1, dtype=jnp.int32) - 1
    begin = jax.lax.cummax(jnp.where(first, at, 0), axis=1)
    # From a token to its unit's output, and its place within.
    where = jnp.maximum(rank, 0) * width + jnp.minimum(at - begin, width - 1)
    # Back in the order of tokens; those read beside get their output below.
    output = jax.tree.map(lambda x: take_tokens(joined(x), where), out)
    if alone is None:
        # These begin from `fresh` and nothing follows them, so that all run side by side.
        short = _units(first & ~goes_on, size, starts, length)

        @jax.checkpoint
        def read_short(tokens: Any) -> Any:
            return jax.lax.cond(
                jnp.any(short.size > 0),
                lambda: _side_by_side(within, fresh, tokens, short, output, width=width),
                lambda: jax.tree.map(jnp.zeros_like, output),
            )

        others = read_short(tokens)
    else:
        others = alone(tokens)
    kept = jax.tree.map(
        lambda x, y: jnp.where(goes_on.reshape(groups, 1, length, *[1] * (x.ndim - 3)), x, y),
        output,
        others,
    )
    return state, kept


def _side_by_side(within, fresh, tokens, units: Units, like: Any, *, width: int) -> Any:
    """What tokens of units that all begin with the fresh state read; zeros for all others."""
    groups, most = units.start.shape
    beside = min(_BESIDE, most)
    steps = -(-most // (beside * _STEPS))
    repeated = jax.tree.map(lambda x: jnp.repeat(x, beside, axis=0), fresh)
    zeros = jax.tree.map(jnp.zeros_like, like)
    output_length = jax.tree.leaves(like)[0].shape[2]

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, steps * _STEPS * beside - most)))
        return jnp.moveaxis(x.reshape(groups, steps, _STEPS, beside), 0, 2)

    @jax.checkpoint
    def read(tokens: Any, start: jax.Array, size: jax.Array) -> Any:
        """Of units `[groups, beside]`, leaves `[groups, members, beside * width, ...]`."""
        pieces = jax.tree.map(lambda x: _windows(x, start, width), tokens)
        _, out = _if_any(within, repeated, pieces, size.reshape(-1))
        return jax.tree.map(lambda x: _beside(x, groups, beside), out)

    def put(output: Any, unit: Units, tokens: Any) -> Any:
        out = read(tokens, unit.start, unit.size)
        offset = jnp.arange(width, dtype=jnp.int32)[None, None]
        at = unit.start[:, :, None] + offset
        at = jnp.where(offset < unit.size[:, :, None], at, output_length)
        at = at.reshape(groups, -1)
        # Units do not overlap, so adding to zeros puts each in its place.
        add = jax.vmap(lambda old, new, at: old.at[:, at].add(new, mode="drop"))
        return jax.tree.map(lambda old, new: add(old, new, at), output, out)

    @jax.checkpoint
    def some(tokens: Any, some_units: Units) -> Any:
        """Of units `[steps, groups, beside]`, zeros where there are none."""

        def scan() -> Any:
            step = lambda output, unit: (put(output, unit, tokens), None)  # noqa: E731
            return jax.lax.scan(step, zeros, some_units)[0]

        return jax.lax.cond(jnp.any(some_units.size > 0), scan, lambda: zeros)

    def add_some(output: Any, some_units: Units) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, output, some(tokens, some_units)), None

    return jax.lax.scan(add_some, zeros, jax.tree.map(split, units))[0]


def _if_any(
    within, state: Any, piece: Any, count: jax.Array, *, narrow: int | None = None
) -> tuple[Any, Any]:
    """`within`, or if no group has a token, the state as it is and zeros."""
    width, longest = jax.tree.leaves(piece)[0].shape[2], jnp.max(count)

    def skip() -> tuple[Any, Any]:
        return unchanged(within, state, piece, count)

    def whole() -> tuple[Any, Any]:
        return within(state, piece, count)

    if narrow is None or narrow >= width:
        return jax.lax.cond(longest > 0, whole, skip)

    def part() -> tuple[Any, Any]:
        after, out = within(state, jax.tree.map(lambda x: x[:, :, :narrow], piece), count)
        behind = (0, width - narrow)
        return after, jax.tree.map(
            lambda x: jnp.pad(x, [(0, 0), (0, 0), behind, *[(0, 0)] * (x.ndim - 3)]), out
        )

    # One program has all three forms; a step runs one of them.
    which = (longest > 0).astype(jnp.int32) + (longest > narrow).astype(jnp.int32)
    return jax.lax.switch(which, (skip, part, whole))


def _units(first: jax.Array, size: jax.Array, starts: jax.Array, most: int) -> Units:
    """The units whose first tokens are marked, at most so many of each row."""
    length = first.shape[1]
    find = jax.vmap(lambda marks: jnp.nonzero(marks, size=most, fill_value=length)[0])
    start = find(first).astype(jnp.int32)
    there, safe = start < length, jnp.minimum(start, length - 1)

    def of(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, safe, axis=1)

    return Units(safe, jnp.where(there, of(size), 0), there & of(starts))


def _next(starts: Bool[Array, "groups length"]) -> Int[Array, "groups length"]:
    """Where the document after each token's begins; the length where there is none."""
    length = starts.shape[1]
    at = jnp.where(starts, jnp.arange(length, dtype=jnp.int32)[None], length)
    later = jnp.concatenate([at[:, 1:], jnp.full_like(at[:, :1], length)], axis=1)
    return jax.lax.cummin(later, axis=1, reverse=True)


def _pieces(x: jax.Array, start: Int[Array, "groups units"], width: int) -> jax.Array:
    """`[units, groups, members, width, ...]`: tokens from each start on; the last one repeated."""
    x = _windows(x, start, width)
    return x.reshape(*start.shape, *x.shape[1:]).swapaxes(0, 1)


def _windows(x: jax.Array, start: Int[Array, "groups beside"], width: int) -> jax.Array:
    """`[groups * beside, members, width, ...]`: tokens from each start on."""
    at = start[:, :, None] + jnp.arange(width, dtype=jnp.int32)[None, None]
    at = at.reshape(start.shape[0], -1)
    x = take_tokens(x, at)
    x = x.reshape(*x.shape[:2], start.shape[1], width, *x.shape[3:])
    return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:])


def _beside(x: jax.Array, groups: int, beside: int) -> jax.Array:
    """`[groups * beside, members, width, ...]` to `[groups, members, beside * width, ...]`."""
    x = jnp.moveaxis(x.reshape(groups, beside, *x.shape[1:]), 1, 2)
    return x.reshape(groups, x.shape[1], -1, *x.shape[4:])
