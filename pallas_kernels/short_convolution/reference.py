"""The operation's definition in plain JAX."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.numerics import l2_normalize
from fwpkm_jax.core.sequence.convolution import causal_convolution
from pallas_kernels.short_convolution.arguments import Part, channels_of, columns_of


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


def short_convolution(
    x: Float[Array, "batch length groups columns"],
    before: Float[Array, "batch reach channels"],
    weight: Float[Array, "width channels"],
    documents: Int[Array, "batch length"] | None,
    *,
    parts: Sequence[Part],
    activation: Callable[[jax.Array], jax.Array],
    dtype: DTypeLike | None,
) -> tuple[Float[Array, "batch length _"], ...]:
    """As `api.short_convolution`."""
    split = parts_of(x, parts)
    inputs = jnp.concatenate(
        [y for y, part in zip(split, parts, strict=True) if part.convolved], axis=-1
    )
    mixed = activation(causal_convolution(inputs, before, weight, documents))
    channels = channels_of(parts, x.shape[2])
    ends = [place.stop for place in channels if place is not None][:-1]
    results = iter(jnp.split(mixed, ends, axis=-1))

    def result(y: jax.Array, part: Part) -> jax.Array:
        if not part.convolved:
            return y
        one = next(results)
        if part.head is not None:
            one = l2_normalize(one.reshape(*one.shape[:2], -1, part.head)).reshape(one.shape)
        return one if dtype is None else one.astype(dtype)

    return tuple(result(y, part) for y, part in zip(split, parts, strict=True))
