"""Pieces of a stream cut where the chunks of each group end."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

State = TypeVar("State")
Within = Callable[[State, Any, jax.Array], tuple[State, Any]]
"""From a state, tokens of one chunk and how many of them each group has (its first ones) to the
state after them and their outputs."""


def in_chunks(
    within: Within[State],
    state: State,
    tokens: PyTree[Array],
    *,
    count: Int[Array, " groups"],
    chunk: int,
    position: Int[Array, " groups"] | None = None,
) -> tuple[State, PyTree[Array]]:
    """Calls `within` for every chunk that a piece of a stream reaches, in order.

    Groups may stand at different places of their chunks, as padding leaves them: each has its own
    cuts.

    Args:
      within: takes tokens of one chunk.
      state: before the piece, leaves `[groups, ...]`.
      tokens: the piece, leaves `[groups, members, length, ...]`.
      count: how many of the tokens each group has, its first ones.
      position: tokens of each group before the piece, less any multiple of `chunk`. None: every
        group begins its first chunk.

    Returns:
      The state, and the outputs, leaves `[groups, members, length, ...]`. Those behind a group's
      last token have no meaning.
    """
    length = jax.tree.leaves(tokens)[0].shape[2]
    if position is None:
        return _from_the_first(within, state, tokens, count, chunk)
    if length == 1:
        return within(state, tokens, count)
    # A piece reaches one chunk more than it fills if it begins inside one.
    width, number = min(chunk, length), -(-(chunk - 1 + length) // chunk)
    offset = position % chunk
    steps = jnp.arange(width, dtype=jnp.int32)[None]

    def read(state: State, index: jax.Array) -> tuple[State, Any]:
        """The tokens of each group's chunk of this index."""
        # Groups differ in their offset, so the same index cuts each of them elsewhere.
        end = (index + 1) * chunk - offset
        start = jnp.maximum(end - chunk, 0)
        own = jnp.clip(jnp.minimum(end, count) - start, 0, width)
        at = jnp.where(steps < own[:, None], start[:, None] + steps, 0)
        piece = jax.tree.map(lambda x: take_tokens(x, at), tokens)

        # A chunk that no group reaches costs nothing.
        return jax.lax.cond(
            jnp.any(own > 0),
            lambda: within(state, piece, own),
            lambda: unchanged(within, state, piece, own),
        )

    state, out = jax.lax.scan(read, state, jnp.arange(number, dtype=jnp.int32))
    token = jnp.arange(length, dtype=jnp.int32)[None]
    index = (token + offset[:, None]) // chunk
    step = token - jnp.maximum(index * chunk - offset[:, None], 0)
    at = index * width + step
    return state, jax.tree.map(lambda x: take_tokens(joined(x), at), out)


def _from_the_first(within, state, tokens, count, chunk):
    """`in_chunks` of groups that all stand at the same place: their first token."""
    number, rest = divmod(jax.tree.leaves(tokens)[0].shape[2], chunk)
    outputs = []

    def read(state: State, piece: tuple[jax.Array, Any]) -> tuple[State, Any]:
        start, part = piece
        size = jax.tree.leaves(part)[0].shape[2]
        return within(state, part, jnp.clip(count - start, 0, size))

    def split(x: jax.Array) -> jax.Array:
        x = x[:, :, : number * chunk].reshape(*x.shape[:2], number, chunk, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0)

    if number:
        starts = chunk * jnp.arange(number, dtype=jnp.int32)
        state, out = jax.lax.scan(read, state, (starts, jax.tree.map(split, tokens)))
        outputs.append(jax.tree.map(joined, out))
    if rest:
        last = jax.tree.map(lambda x: x[:, :, number * chunk :], tokens)
        state, out = read(state, (jnp.int32(number * chunk), last))
        outputs.append(out)
    return state, jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *outputs)


def unchanged(within: Within[State], state: State, piece: Any, count: Any) -> tuple[State, Any]:
    """The state as it is, and zeros in place of what `within` would give."""
    _, out = jax.eval_shape(within, state, piece, count)
    return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)


def select(flags: Bool[Array, " groups"], new: PyTree[Array], old: PyTree[Array]) -> PyTree[Array]:
    """Leaves `[groups, ...]`: the new ones of groups with a flag, the old ones of the others."""
    return jax.tree.map(
        lambda new, old: jnp.where(flags.reshape(-1, *[1] * (old.ndim - 1)), new, old), new, old
    )


def take_tokens(x: jax.Array, at: Int[Array, "groups places"]) -> jax.Array:
    """Each group's tokens at these places, of `[groups, members, length, ...]`."""
    return jax.vmap(lambda x, at: jnp.take(x, at, axis=1, mode="clip"))(x, at)


def joined(x: jax.Array) -> jax.Array:
    """`[chunks, groups, members, width, ...]` to `[groups, members, chunks * width, ...]`."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])
