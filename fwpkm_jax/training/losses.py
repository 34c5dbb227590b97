"""The loss of a batch: weighted cross-entropies, some tokens' logits at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from fwpkm_jax.core.cross_entropy import linear_cross_entropy
from fwpkm_jax.layers.partition import BATCH, HEADS, Partition
from fwpkm_jax.models.language_model import LanguageModel


def weighted_loss(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of the labels' weighted cross-entropies in nats, a scalar.

    Args:
      logits: float `[batch, length, vocab]`.
      labels: int `[batch, length]`.
      weights: float `[batch, length]`; a weight of 0 hides a label from the loss.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * weights)


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
    """`weighted_loss` of the logits of `x [batch, length, model]`, `block` tokens at a time.

    Over several devices each takes its own tokens, `block` at a time; those along `model` a part of
    each sequence. A bias of each token's own is as large as all logits, which are then formed at
    once.
    """
    if token_bias is not None:
        return weighted_loss(model.logits(x, token_bias), labels, weights)

    def of_tokens(x, head, bias, labels, weights):
        x = x.reshape(-1, x.shape[-1])
        labels, weights = labels.reshape(-1), weights.reshape(-1)
        return linear_cross_entropy(x, head, bias, labels, weights, block=block)

    head, bias = model.readout()
    if partition is None:
        return of_tokens(x, head, bias, labels, weights)

    def of_device(x, head, *rest):
        head = jax.lax.all_gather(head, "fsdp", axis=0, tiled=True)
        return of_tokens(x, head, *rest)[None]

    tokens = P(BATCH, HEADS)
    losses = partition.run(
        of_device,
        in_specs=(tokens, P("fsdp"), P(), tokens, tokens),
        out_specs=P((*BATCH, HEADS)),
    )
    return jnp.sum(losses(x, head, bias, labels, weights))
