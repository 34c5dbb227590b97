"""The loss of a batch: weighted cross-entropies, computed for a block of tokens at a time."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from fwpkm_jax.core.cross_entropy import linear_cross_entropy
from fwpkm_jax.layers.partition import BATCH, HEADS, Partition
from fwpkm_jax.models.language_model import LanguageModel
from pallas_kernels.cross_entropy import row_cross_entropy

_SHARPNESS = 4.0
"""Of the address loss: for halves of unit length, 8 times the sum of both cosines."""


def weighted_loss(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted sum of the labels' cross-entropies in nats, a scalar.

    Args:
      logits: float `[batch, length, vocab]`.
      labels: int `[batch, length]`.
      weights: float `[batch, length]`; a label of weight 0 does not count.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * weights)


def address_loss(
    query: jax.Array, distance: jax.Array, *, segment_ids: jax.Array | None = None
) -> jax.Array:
    """How badly a question's query finds the query of what it asks for, a scalar in nats.

    Mean over the asking tokens of a cross-entropy: with the softmax of minus `_SHARPNESS` times the
    squared distance between queries, over all tokens of the row, each should choose the token that
    stood at the same place when its answer was told. A memory reads and writes where the query
    points, so that the question then reads what the statement has written.

    Args:
      query: `[batch, length, heads, key]`, of one memory layer.
      distance: int `[batch, length]`, from an asking token back to the telling one; 0: asks not.
      segment_ids: 0 marks padding, which is not chosen.

    References: van den Oord et al. 2018, arXiv:1807.03748, for the loss.
    """
    query = query.reshape(*query.shape[:2], -1)
    norms = jnp.sum(query**2, axis=-1)
    products = jnp.einsum("btk,bsk->bts", query, query)
    scores = -_SHARPNESS * (norms[:, :, None] + norms[:, None] - 2.0 * products)
    place = jnp.arange(query.shape[1])
    # Only earlier tokens have been written.
    allowed = (place[:, None] > place[None])[None]
    if segment_ids is not None:
        allowed = allowed & (segment_ids[:, None] > 0)
    scores = jnp.where(allowed, scores, -jnp.inf)
    asks = distance > 0
    told = jnp.where(asks, place[None] - distance, 0)
    # Tokens that do not ask have no scores to take a logarithm of.
    scores = jnp.where(asks[:, :, None], scores, 0.0)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, told)
    return jnp.sum(losses * asks) / jnp.maximum(jnp.sum(asks), 1)


def readout_loss(
    model: LanguageModel,
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    block: int,
    token_bias: jax.Array | None = None,
    partition: Partition | None = None,
) -> jax.Array:
    """`weighted_loss` of the logits of hidden states, in nats, computed `block` tokens at a time.

    With several devices each computes the loss of its own tokens, `block` at a time; the devices
    along the mesh axes `sequence` and `model` split each sequence. `token_bias` is as large as all
    logits, so with it all logits are computed at once.

    Args:
      x: `[batch, length, model]`, from `LanguageModel.hidden`.
      labels: int `[batch, length]`.
      weights: float `[batch, length]`; a label of weight 0 does not count.
      block: tokens whose logits are in memory at once.
      token_bias: `[batch, length, vocab]`, added to each token's logits; None: no such bias.
      partition: of the batch over devices; None: one device.
    """
    if token_bias is not None:
        return weighted_loss(model.logits(x, token_bias), labels, weights)

    def of_tokens(x, head, bias, labels, weights):
        x = x.reshape(-1, x.shape[-1])
        labels, weights = labels.reshape(-1), weights.reshape(-1)
        return linear_cross_entropy(
            x, head, bias, labels, weights, block=block, of_rows=row_cross_entropy
        )

    head, bias = model.readout()
    if partition is None:
        return of_tokens(x, head, bias, labels, weights)

    def of_device(x, head, *rest):
        head = jax.lax.all_gather(head, "fsdp", axis=0, tiled=True)
        return of_tokens(x, head, *rest)[None]

    tokens = partition.tokens(also=(HEADS,))
    axis = partition.sequence
    parts = (*BATCH, HEADS) if axis is None else (*BATCH, axis.name, HEADS)
    losses = partition.run(
        of_device,
        in_specs=(tokens, P("fsdp"), P(), tokens, tokens),
        out_specs=P(parts),
    )
    return jnp.sum(losses(x, head, bias, labels, weights))
