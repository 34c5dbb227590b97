"""Softmax attention over keys that travel from device to device around a ring."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.attention.running_softmax import Sums, add_keys, no_keys
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.sequence.axis import SequenceAxis

_LEAST_BLOCK, _MOST_BLOCK = 64, 512  # Keys whose scores are formed at a time.
_SCORES = 2**26  # Scores formed at a time, if that takes no smaller block than the least.


class Keys(NamedTuple):
    """Keys and values with what decides who sees them; the leaves are `[batch, keys, ...]`.

    Attributes:
      key: `[batch, keys, kv_heads, head]`.
      value: `[batch, keys, kv_heads, head]`.
      positions: of each key in its document, -1 for keys that no query sees.
      documents: number of each key's document; None: all are of one.
    """

    key: Float[Array, "batch keys kv_heads head"]
    value: Float[Array, "batch keys kv_heads head"]
    positions: Int[Array, "batch keys"]
    documents: Int[Array, "batch keys"] | None


def attention_around(
    query: Float[Array, "batch length heads head"],
    own: Keys,
    *,
    axis: SequenceAxis,
    window: int | None = None,
    first: Keys | None = None,
) -> Float[Array, "batch length heads head"]:
    """`core.attention.softmax.masked_attention` of a part's queries to all keys of the sequence.

    The keys and values of each part visit the devices one after the other; sums and the log of the
    softmax's denominator are in at least float32. A device sends the keys and values of
    `devices - 1` parts; in the backward pass it sends these again, and the gradients of `devices`
    parts. It keeps one visiting part at a time, forward and backward. Parts of later tokens are
    not scored, so that the first device has the least work and the last the most.

    Args:
      query: of this device's tokens, whose positions and documents `own` gives.
      own: keys and values of this device's tokens.
      window: positions seen, the query's own included; None: all up to the query's.
      first: keys and values of tokens before the sequence, equal on all devices.
    """
    ids = (own.positions, own.documents)
    first_keys = None if first is None else (first.key, first.value)
    first_ids = None if first is None else (first.positions, first.documents)
    return _attention(axis, window, query, (own.key, own.value), first_keys, ids, first_ids)


class _Queries(NamedTuple):
    """Queries `[batch, queries, kv_heads, shared, head]`, what decides which keys they see."""

    query: jax.Array
    positions: jax.Array
    documents: jax.Array | None
    window: int | None

    def scores(self, keys: Keys, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Scores `[batch, kv_heads, shared, queries, keys]`, and which of them count."""
        scores = jnp.einsum("bqhrd,bkhd->bhrqk", self.query, keys.key, preferred_element_type=dtype)
        at, key_at = self.positions[:, :, None], keys.positions[:, None, :]
        seen = (key_at >= 0) & (key_at <= at)
        if self.window is not None:
            seen &= key_at > at - self.window
        if self.documents is not None and keys.documents is not None:
            seen &= self.documents[:, :, None] == keys.documents[:, None, :]
        return scores * self.query.shape[-1] ** -0.5, seen[:, None, None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(axis, window, query, own, first, ids, first_ids):
    return _forward(axis, window, query, own, first, ids, first_ids)[0]


def _forward(axis, window, query, own, first, ids, first_ids):
    queries, keys = _queries(query, own, ids, window), Keys(*own, *ids)
    dtype = compute_dtype(query.dtype, keys.key.dtype)
    batch, length, kv_heads, shared, head = queries.query.shape
    shape = (batch, kv_heads, shared, length)
    sums = no_keys(shape, head=head, dtype=dtype)
    if first is not None:
        sums = _add(sums, queries, Keys(*first, *first_ids))

    def visit(carry: tuple[Sums, Keys], hop: jax.Array) -> tuple[tuple[Sums, Keys], None]:
        sums, keys = carry
        coming = axis.rotate(keys)  # Before the scores, so that both can happen at once.
        return (_add_if_earlier(sums, queries, keys, hop, axis), coming), None

    hops = jnp.arange(axis.size - 1, dtype=jnp.int32)
    (sums, keys), _ = jax.lax.scan(visit, (sums, keys), hops)
    sums = _add_if_earlier(sums, queries, keys, axis.size - 1, axis)
    mean = sums.mean
    output = jnp.moveaxis(mean, 3, 1).reshape(query.shape).astype(own[1].dtype)
    return output, (query, own, first, ids, first_ids, mean, sums.highest + jnp.log(sums.total))


def _backward(axis, window, residuals, cotangent):
    query, own, first, ids, first_ids, mean, log_sum = residuals
    queries, keys = _queries(query, own, ids, window), Keys(*own, *ids)
    dtype = mean.dtype
    cotangent = cotangent.reshape(queries.query.shape)
    # The softmax's backward pass needs the sum of weight times slope: it is this product.
    met = jnp.einsum("bqhrd,bhrqd->bhrq", cotangent.astype(dtype), mean)
    back = _Back(cotangent, log_sum, met)
    query_gradient, first_gradient = jnp.zeros(queries.query.shape, dtype), None
    if first is not None:
        query_gradient, first_gradient = _gradients(
            query_gradient, queries, Keys(*first, *first_ids), back
        )
        first_gradient = _like(first_gradient, first)

    def visit(carry, hop):
        query_gradient, keys, gradients = carry
        coming = axis.rotate(keys)
        query_gradient, gradients = _gradients_if_earlier(
            query_gradient, gradients, queries, keys, back, hop, axis
        )
        # The gradients of keys travel with their keys and arrive at home after a whole round.
        return (query_gradient, coming, axis.rotate(gradients)), None

    zeros = tuple(jnp.zeros(x.shape, dtype) for x in own)
    hops = jnp.arange(axis.size - 1, dtype=jnp.int32)
    carry, _ = jax.lax.scan(visit, (query_gradient, keys, zeros), hops)
    query_gradient, keys, gradients = carry
    query_gradient, gradients = _gradients_if_earlier(
        query_gradient, gradients, queries, keys, back, axis.size - 1, axis
    )
    own_gradient = _like(axis.rotate(gradients), own)
    query_gradient = query_gradient.reshape(query.shape).astype(query.dtype)
    return query_gradient, own_gradient, first_gradient, None, None


_attention.defvjp(_forward, _backward)


class _Back(NamedTuple):
    """What the backward pass knows of each query: `[batch, kv_heads, shared, queries]`.

    Attributes:
      cotangent: of the output, `[batch, queries, kv_heads, shared, head]`.
      log_sum: log of the softmax's denominator.
      met: the output's product with its cotangent.
    """

    cotangent: jax.Array
    log_sum: jax.Array
    met: jax.Array


def _queries(query, own, ids, window) -> _Queries:
    kv_heads = own[0].shape[2]
    shape = (*query.shape[:2], kv_heads, query.shape[2] // kv_heads, query.shape[3])
    return _Queries(query.reshape(shape), ids[0], ids[1], window)


def _add_if_earlier(sums: Sums, queries: _Queries, keys: Keys, hop: Any, axis) -> Sums:
    """The sums with the keys that have travelled `hop` devices, unless they are later tokens'."""
    return jax.lax.cond(
        axis.index >= hop, lambda sums: _add(sums, queries, keys), lambda sums: sums, sums
    )


def _gradients_if_earlier(query_gradient, gradients, queries, keys, back, hop, axis):
    def add(query_gradient, gradients):
        query_gradient, new = _gradients(query_gradient, queries, keys, back)
        return query_gradient, jax.tree.map(jnp.add, gradients, new)

    return jax.lax.cond(axis.index >= hop, add, lambda *same: same, query_gradient, gradients)


def _add(sums: Sums, queries: _Queries, keys: Keys) -> Sums:
    dtype = sums.value.dtype

    def add(sums: Sums, keys: Keys) -> tuple[Sums, None]:
        scores, seen = queries.scores(keys, dtype)
        return add_keys(sums, scores, seen, keys.value), None

    return jax.lax.scan(add, sums, _blocks(keys, sums.weight.size))[0]


def _gradients(query_gradient: jax.Array, queries: _Queries, keys: Keys, back: _Back):
    """The queries' gradient with what these keys add, and the gradients of keys and values."""
    dtype = query_gradient.dtype

    def add(query_gradient, keys):
        scores, seen = queries.scores(keys, dtype)
        # The weights once more, from the sum that the forward pass kept; nothing of their size is
        # stored.
        weights = jnp.where(seen, jnp.exp(scores - back.log_sum[..., None]), 0)
        value_gradient = jnp.einsum("bhrqk,bqhrd->bkhd", weights, back.cotangent.astype(dtype))
        slope = jnp.einsum(
            "bqhrd,bkhd->bhrqk", back.cotangent, keys.value, preferred_element_type=dtype
        )
        slope = weights * (slope - back.met[..., None]) * queries.query.shape[-1] ** -0.5
        query_gradient += jnp.einsum("bhrqk,bkhd->bqhrd", slope, keys.key.astype(dtype))
        key_gradient = jnp.einsum("bhrqk,bqhrd->bkhd", slope, queries.query.astype(dtype))
        return query_gradient, (key_gradient, value_gradient)

    query_gradient, found = jax.lax.scan(add, query_gradient, _blocks(keys, back.met.size))

    def whole(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : keys.key.shape[1]]

    return query_gradient, jax.tree.map(whole, found)


def _blocks(keys: Keys, queries: int) -> Keys:
    """`[batch, keys, ...]` to `[blocks, batch, block, ...]`; added keys are seen by no query.

    Each block is for scores with `queries` numbers per key.
    """
    number, block = keys.key.shape[1], _MOST_BLOCK
    while block > _LEAST_BLOCK and block * queries > _SCORES:
        block //= 2
    block = min(block, number)

    def cut(x: jax.Array, fill: int = 0) -> jax.Array:
        widths = [(0, 0), (0, -number % block)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

    documents = None if keys.documents is None else cut(keys.documents)
    return Keys(cut(keys.key), cut(keys.value), cut(keys.positions, -1), documents)


def _like(tree: Any, arrays: Any) -> Any:
    return jax.tree.map(lambda x, like: x.astype(like.dtype), tree, arrays)
