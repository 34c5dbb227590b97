"""How the columns of a projection become the convolution's results."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPS = 1e-6
"""Added to a head's sum of squares, as in `core.numerics.l2_normalize`."""


class Part(NamedTuple):
    """Columns of every group, after those of the parts before, that become one result."""

    width: int
    """Columns of each group."""
    head: int | None = None
    """Width of the vectors that are brought to unit length, which divides `width`; None: none."""
    convolved: bool = True
    """False: these columns pass through unchanged; they have no taps."""


class Arrays(NamedTuple):
    """Arguments of the kernels."""

    x: jax.Array
    """`[batch, length, groups, columns]`; length a multiple of the tiles of both kernels."""
    before: jax.Array
    """`[batch, width - 1, channels]`."""
    weight: jax.Array
    """`[width, channels]`, float32 or bfloat16."""
    seen: jax.Array | None
    """Inputs before each token that it sees, `[batch, length]` int32; None: all."""


class Columns(NamedTuple):
    """The columns of a part in each group."""

    start: int
    stop: int


def columns_of(parts: Sequence[Part]) -> list[Columns]:
    """Where each part lies in a group."""
    ends = itertools.accumulate(part.width for part in parts)
    return [Columns(end - part.width, end) for part, end in zip(parts, ends, strict=True)]


def channels_of(parts: Sequence[Part], groups: int) -> list[Columns | None]:
    """Where each part lies among the channels of the taps; None for one that has none."""
    sizes = [groups * part.width * part.convolved for part in parts]
    places = zip(sizes, itertools.accumulate(sizes), strict=True)
    return [Columns(end - size, end) if size else None for size, end in places]


def parts_of(
    x: Float[Array, "batch length groups columns"], parts: Sequence[Part]
) -> list[Float[Array, "batch length _"]]:
    """The columns of each part, those of all groups joined."""
    ends = [columns.stop for columns in columns_of(parts)[:-1]]
    return [y.reshape(*x.shape[:2], -1) for y in jnp.split(x, ends, axis=-1)]


def joined_inputs(
    x: Float[Array, "batch length groups columns"], parts: Sequence[Part]
) -> Float[Array, "batch length channels"]:
    """The convolution's inputs: all columns of the first part, of the second, and so on."""
    split = zip(parts_of(x, parts), parts, strict=True)
    return jnp.concatenate([y for y, part in split if part.convolved], axis=-1)
