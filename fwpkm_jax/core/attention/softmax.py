"""Causal softmax attention over the last `window` positions, or over all.

Tokens carry their positions, so that cached keys and padding need no special case: a query sees
the keys at `query position - window < position <= query position`, and a key at position -1
(an empty cache entry, padding) is seen by none. Where documents share a row, tokens also carry
their document's number, and a query sees the keys of its own; positions then start again in each.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.documents import document_numbers, document_positions, pack_starts
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.padding import Packing

AttentionBackend = Literal["auto", "xla", "cudnn"]
_WHOLE_LENGTH = 1024  # Longest sequence whose scores are formed all at once.
_LOGGER = logging.getLogger(__name__)


class Persistent(NamedTuple):
    """Keys and values of tokens that stand before every document.

    Attributes:
      key: `[persistent, kv_heads, head]`.
      value: `[persistent, kv_heads, head]`.
      positions: None: every query sees all of them. Otherwise a query sees those in its window, if
        its document has started in the row: the document's own positions follow on these.
    """

    key: Float[Array, "persistent kv_heads head"]
    value: Float[Array, "persistent kv_heads head"]
    positions: Int[Array, " persistent"] | None = None


def token_positions(
    starts: Bool[Array, "batch length"] | None,
    packing: Packing | None,
    *,
    shape: tuple[int, ...],
    first: jax.Array | None,
    begin: int = 0,
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"] | None]:
    """Each packed token's position in its document, -1 for padding, and that document's number.

    Args:
      starts: first tokens of documents, before packing; None: a row is one, without a number.
      packing: of the padding, or None.
      first: position of the first token if it starts no document; None: 0.
      begin: position of each document's first token.
    """
    documents = None
    if starts is None:
        positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        positions = positions if first is None else positions + first[:, None]
    else:
        starts = pack_starts(starts, packing)
        positions, documents = document_positions(starts, first=first), document_numbers(starts)
        if begin:
            positions += jnp.where(documents > 0, begin, 0)
    return positions if packing is None else jnp.where(packing.is_real, positions, -1), documents


def masked_attention(
    query: Float[Array, "batch queries heads head"],
    key: Float[Array, "batch keys kv_heads head"],
    value: Float[Array, "batch keys kv_heads head"],
    *,
    query_positions: Int[Array, "batch queries"],
    key_positions: Int[Array, "batch keys"],
    window: int | None,
    num_persistent: int = 0,
    query_documents: Int[Array, "batch queries"] | None = None,
    key_documents: Int[Array, "batch keys"] | None = None,
) -> Float[Array, "batch queries heads head"]:
    """Attention that scores every query against every key; memory grows with their product.

    Query head h reads key-value head `h // (heads / kv_heads)`. Scores and softmax are in at
    least float32. A query that sees no key gets zeros.

    Args:
      query: `[batch, queries, heads, head]`; scores are scaled by `head ** -0.5`.
      key_positions: `[batch, keys]`, -1 for keys to hide.
      window: positions seen, the query's own included; None for all up to the query's.
      num_persistent: number of first keys that stand before every document. Those at position -1
        are seen by every query whose own position is not -1; those with a position by the queries
        of documents from 1 on, within the window.
      query_documents: `[batch, queries]`, number of each query's document; None: one document.
      key_documents: `[batch, keys]`, number of each key's document; both or neither.

    Returns:
      `[batch, queries, heads, head]` in the dtype of `value`.
    """
    check_arrays(
        query=(query, "float batch queries heads head"),
        key=(key, "float batch keys kv_heads head"),
        value=(value, "float batch keys kv_heads head"),
        query_positions=(query_positions, "int batch queries"),
        key_positions=(key_positions, "int batch keys"),
        query_documents=(query_documents, "int batch queries"),
        key_documents=(key_documents, "int batch keys"),
    )
    batch, queries, heads, head = query.shape
    keys, kv_heads = key.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly.")

    dtype = compute_dtype(query.dtype, key.dtype)
    query = query.reshape(batch, queries, kv_heads, heads // kv_heads, head)
    scores = jnp.einsum("bqhrd,bkhd->bhrqk", query, key, preferred_element_type=dtype)
    at, key_at = query_positions[:, :, None], key_positions[:, None, :]
    # Causality by position, so that caches and padding need no masks of their own.
    seen = (key_at >= 0) & (key_at <= at)
    if window is not None:
        seen &= key_at > at - window
    first = (jnp.arange(keys) < num_persistent)[None, None]
    if query_documents is not None and key_documents is not None:
        own = query_documents[:, :, None]
        same = own == key_documents[:, None, :]
        seen &= jnp.where(first, own > 0, same) if num_persistent else same
    if num_persistent:
        seen |= first & (key_at < 0) & (at >= 0)
    seen = seen[:, None, None]
    # A finite score for hidden keys, so that a row without any seen key has no NaN in it.
    scores = jnp.where(seen, scores * head**-0.5, 0.5 * jnp.finfo(dtype).min)
    # Again, because a row without any key would have equal weights.
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0).astype(value.dtype)
    output = jnp.einsum("bhrqk,bkhd->bqhrd", weights, value, preferred_element_type=dtype)
    return output.reshape(batch, queries, heads, head).astype(value.dtype)


def query_block_attention(
    query: Float[Array, "batch queries heads head"],
    key: Float[Array, "batch keys kv_heads head"],
    value: Float[Array, "batch keys kv_heads head"],
    *,
    query_positions: Int[Array, "batch queries"],
    key_positions: Int[Array, "batch keys"],
    window: int | None,
    block: int,
    num_persistent: int = 0,
    query_documents: Int[Array, "batch queries"] | None = None,
    key_documents: Int[Array, "batch keys"] | None = None,
) -> Float[Array, "batch queries heads head"]:
    """`masked_attention` for `block` queries at a time: the same, in memory linear in the length.

    A block's scores are formed again in the backward pass.
    """
    batch, queries = query.shape[:2]
    added = -queries % block

    def blocks(x, fill=0):
        widths = [(0, 0), (0, added)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=fill)
        return jnp.moveaxis(x.reshape(batch, -1, block, *x.shape[2:]), 1, 0)

    # Within a loop nothing could be shared, so that no barrier against it is needed.
    @partial(jax.checkpoint, prevent_cse=False)
    def attend(part):
        query, positions, documents = part
        options = {"query_positions": positions, "key_positions": key_positions}
        options |= {"window": window, "num_persistent": num_persistent}
        options |= {"query_documents": documents, "key_documents": key_documents}
        return masked_attention(query, key, value, **options)

    documents = None if query_documents is None else blocks(query_documents)
    output = jax.lax.map(attend, (blocks(query), blocks(query_positions, -1), documents))
    output = jnp.moveaxis(output, 0, 1).reshape(batch, -1, *query.shape[2:])
    return output[:, :queries]


def cudnn_attention(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    *,
    positions: Int[Array, "batch length"],
    window: int | None,
) -> Float[Array, "batch length heads head"]:
    """`masked_attention` within whole sequences by cuDNN's fused kernel, where nothing refuses it.

    Args:
      query: `[batch, length, heads, head]`, bfloat16 or float16.
      positions: 0, 1, 2, ... for real tokens, which come first; -1 behind them.
    """
    # cuDNN counts the tokens to the left, without the query's own.
    local = None if window is None else (window - 1, 0)
    output = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, local_window_size=local, implementation="cudnn"
    )
    # Padding stands behind all real tokens, so that causality hides it from them.
    return jnp.where((positions >= 0)[:, :, None, None], output, 0)


def cudnn_refusal(query: jax.Array, persistent: Any = None, documents: Any = None) -> str | None:
    """Why cuDNN cannot attend with such queries and rows on this machine, or None."""
    device, width = jax.default_backend(), query.shape[-1]
    reasons = {
        "it takes no persistent keys": persistent is not None,
        "it takes no documents": documents is not None,
        f"the device is a {device}": device != "gpu",
        f"activations are {query.dtype}, not bfloat16 or float16": (
            query.dtype not in (jnp.bfloat16, jnp.float16)
        ),
        f"heads of width {width} are not a multiple of 8 up to 128": width % 8 or width > 128,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def whole_sequence_attention(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    *,
    positions: Int[Array, "batch length"],
    window: int | None,
    backend: AttentionBackend = "auto",
    persistent: Persistent | None = None,
    documents: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch length heads head"]:
    """`cudnn_attention` of any floating dtype, by the fastest available backend.

    Args:
      backend: `cudnn` runs or raises; `xla` is plain JAX; `auto` is cuDNN on a GPU that has it,
        else plain JAX, with a logged line on a GPU.
      persistent: keys and values of tokens before every document; in plain JAX only.
      documents: number of each token's document, `[batch, length]`; a token sees only its own
        document, in which positions start at 0. In plain JAX only.

    Raises:
      ValueError: cuDNN was asked for and does not run here; the reason is named.
    """
    on_gpu = jax.default_backend() == "gpu"
    if backend == "cudnn" or (backend == "auto" and on_gpu):
        refusal = cudnn_refusal(query, persistent, documents)
        if refusal is None:
            return cudnn_attention(query, key, value, positions=positions, window=window)
        if backend == "cudnn":
            raise ValueError(f"cuDNN attention does not run here: {refusal}; use backend='xla'.")
        _LOGGER.warning("Attention in plain JAX, not by cuDNN: %s.", refusal)
    key_positions = positions
    if window is not None and query.shape[1] > 2 * window:
        # Blocks of a window look back on the block before; before the first there is none.
        earlier = ((0, 0), (window, 0), (0, 0), (0, 0))
        key, value = jnp.pad(key, earlier), jnp.pad(value, earlier)
        key_positions = jnp.pad(positions, earlier[:2], constant_values=-1)
    return attend_causally(
        *(query, key, value),
        positions=positions,
        key_positions=key_positions,
        window=window,
        persistent=persistent,
        documents=documents,
    )


def attend_causally(
    query: Float[Array, "batch queries heads head"],
    key: Float[Array, "batch keys kv_heads head"],
    value: Float[Array, "batch keys kv_heads head"],
    *,
    positions: Int[Array, "batch queries"],
    key_positions: Int[Array, "batch keys"],
    window: int | None,
    persistent: Persistent | None = None,
    documents: Int[Array, "batch queries"] | None = None,
) -> Float[Array, "batch queries heads head"]:
    """`masked_attention` of tokens to earlier ones and themselves, in blocks where they are many.

    Args:
      key: of earlier tokens, then of the queries' own. Of more than two windows of queries there
        are `window` earlier ones, as `blockwise_attention` takes them.
      value: as `key`.
      persistent: keys and values of tokens before every document.
      documents: how many documents have started up to each query; earlier tokens are of document 0.
    """
    length = query.shape[1]
    attend: Callable[..., jax.Array] = masked_attention
    # Two blocks of keys for each block of queries pay only where there are more than two.
    if window is not None and length > 2 * window:
        attend = blockwise_attention
    elif length > _WHOLE_LENGTH:
        attend = partial(query_block_attention, block=_WHOLE_LENGTH // 2)
    num_persistent = 0
    if persistent is not None:
        key, value, key_positions = in_front(persistent, key, value, key_positions)
        num_persistent = persistent.key.shape[0]
    before = ((0, 0), (key.shape[1] - length, 0))
    return attend(
        query,
        key,
        value,
        query_positions=positions,
        key_positions=key_positions,
        window=window,
        num_persistent=num_persistent,
        query_documents=documents,
        key_documents=None if documents is None else jnp.pad(documents, before),
    )


def in_front(
    persistent: Persistent | None,
    key: Float[Array, "batch keys kv_heads head"],
    value: Float[Array, "batch keys kv_heads head"],
    key_positions: Int[Array, "batch keys"],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys, values and positions after the persistent ones; position -1 stands for none."""
    if persistent is None:
        return key, value, key_positions
    positions = persistent.positions
    if positions is None:
        positions = jnp.full(persistent.key.shape[:1], -1, jnp.int32)

    def before(first: jax.Array, x: jax.Array) -> jax.Array:
        first = jnp.broadcast_to(first.astype(x.dtype), (x.shape[0], *first.shape))
        return jnp.concatenate([first, x], axis=1)

    first = persistent.key, persistent.value, positions
    key, value, positions = map(before, first, (key, value, key_positions))
    return key, value, positions


def blockwise_attention(
    query: Float[Array, "batch queries heads head"],
    key: Float[Array, "batch keys kv_heads head"],
    value: Float[Array, "batch keys kv_heads head"],
    *,
    query_positions: Int[Array, "batch queries"],
    key_positions: Int[Array, "batch keys"],
    window: int,
    num_persistent: int = 0,
    query_documents: Int[Array, "batch queries"] | None = None,
    key_documents: Int[Array, "batch keys"] | None = None,
) -> Float[Array, "batch queries heads head"]:
    """`masked_attention` over a window at a cost linear in the length.

    Queries are cut into blocks of `window`; a block's keys are its own and the block before.

    Args:
      key: the persistent keys, those of `window` earlier tokens (position -1 where there are
        none), then those of the queries' own tokens. Tokens with a position must stand in unbroken
        order.
      value: as `key`.

    Raises:
      ValueError: there are not `window` more keys than queries.
    """
    batch, queries, heads, head = query.shape
    if key.shape[1] != num_persistent + window + queries:
        raise ValueError(
            f"{key.shape[1] - num_persistent} keys for {queries} queries; put window={window} "
            "keys of earlier tokens, or empty ones at position -1, before the queries' own."
        )
    blocks = -(-queries // window)
    added = blocks * window - queries

    def pad(x, fill=0):
        widths = [(0, 0), (0, added)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, widths, constant_values=fill)

    def own_block(x):
        return x.reshape(batch * blocks, window, *x.shape[2:])

    def with_previous(x, fill=0):
        first, x = x[:, :num_persistent], pad(x[:, num_persistent:], fill)
        x = x.reshape(batch, blocks + 1, window, *x.shape[2:])
        first = jnp.broadcast_to(first[:, None], (batch, blocks, *first.shape[1:]))
        # A window of this size reaches back into the block before, and no further.
        x = jnp.concatenate([first, x[:, :-1], x[:, 1:]], axis=2)
        return x.reshape(batch * blocks, num_persistent + 2 * window, *x.shape[3:])

    output = masked_attention(
        own_block(pad(query)),
        with_previous(key),
        with_previous(value),
        query_positions=own_block(pad(query_positions, -1)),
        key_positions=with_previous(key_positions, -1),
        window=window,
        num_persistent=num_persistent,
        query_documents=None if query_documents is None else own_block(pad(query_documents)),
        key_documents=None if key_documents is None else with_previous(key_documents),
    )
    return output.reshape(batch, blocks * window, heads, head)[:, :queries]
