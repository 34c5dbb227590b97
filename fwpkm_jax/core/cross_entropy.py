"""Cross-entropy of a linear readout, a block of tokens at a time.

The logits of a batch are its largest array by far (8 x 4,096 tokens and 32,000 pieces: 4.2 GB in
float32), and their gradient is as large again. Here they exist for one block of tokens only: the
loss is a weighted sum whose weights are known, so each block's gradient is formed while its logits
exist, and the backward pass only scales the sums. No logits are computed twice.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.numerics import compute_dtype


class _Gradients(NamedTuple):
    x: jax.Array
    head: jax.Array
    bias: jax.Array | None


def row_cross_entropy(
    logits: Float[Array, "tokens vocab"],
    labels: Int[Array, " tokens"],
    weights: Float[Array, " tokens"],
    *,
    dtype: DTypeLike,
) -> tuple[Float[Array, " tokens"], Float[Array, "tokens vocab"]]:
    """Cross-entropies of rows of logits, in nats, and the gradient of their weighted sum.

    Args:
      logits: `[tokens, vocab]`, in at least float32.
      labels: `[tokens]`, each below `vocab`.
      weights: `[tokens]`, in the dtype of the logits.
      dtype: of the gradient.

    Returns:
      The losses `[tokens]`, without their weights, in the dtype of the logits, and the gradient
      `weights * (softmax(logits) - one_hot(labels))`, `[tokens, vocab]`.
    """
    losses, probabilities, chosen = _losses(logits, labels)
    slope = jnp.where(chosen, probabilities - 1, probabilities) * weights[:, None]
    return losses, slope.astype(dtype)


def linear_cross_entropy(
    x: Float[Array, "tokens model"],
    head: Float[Array, "model vocab"],
    bias: Float[Array, " vocab"] | None,
    labels: Int[Array, " tokens"],
    weights: Float[Array, " tokens"],
    *,
    block: int,
    of_rows: Callable[..., tuple[jax.Array, jax.Array]] = row_cross_entropy,
) -> Float[Array, ""]:
    """The sum of the labels' weighted cross-entropies in nats under the logits `x @ head + bias`.

    Logits, softmax and sums are in at least float32; products take their operands in the dtype of
    `x`. Equal to the plain loss in value and gradients up to the order of the sums.

    Args:
      x: `[tokens, model]`, after the final norm.
      labels: `[tokens]`, each below `vocab`.
      weights: `[tokens]`; a weight of 0 hides a label from the loss.
      block: most tokens whose logits exist at once.
      of_rows: `row_cross_entropy` or another function that computes the same; it is called where a
        gradient is formed.

    Raises:
      ValueError: `block` is below 1.
    """
    check_arrays(
        x=(x, "float tokens model"),
        head=(head, "float model vocab"),
        bias=(bias, "float vocab"),
        labels=(labels, "int tokens"),
        weights=(weights, "float tokens"),
    )
    if block < 1:
        raise ValueError(f"block={block} must be at least 1 token.")
    blocks = -(-x.shape[0] // block)
    size = -(-x.shape[0] // blocks)  # Blocks of equal size, so that little is padded.
    return _loss(size, of_rows, x, head, bias, labels, weights)


def _value(size, of_rows, x, head, bias, labels, weights):
    readout = head.astype(x.dtype)

    def body(total, part):
        x, labels, weights = part
        losses, *_ = _losses(_logits(x, readout, bias), labels)
        return total + jnp.sum(losses * weights.astype(losses.dtype)), None

    zero = jnp.zeros((), compute_dtype(x.dtype))
    return jax.lax.scan(body, zero, _blocks(size, x, labels, weights))[0]


def _forward(size, of_rows, x, head, bias, labels, weights):
    readout = head.astype(x.dtype)
    dtype = compute_dtype(x.dtype)

    def body(carry, part):
        total, head_gradient, bias_gradient = carry
        x, labels, weights = part
        weights = weights.astype(dtype)
        # The gradient of a bias sums what is not rounded yet.
        slope_dtype = x.dtype if bias is None else dtype
        logits = _logits(x, readout, bias)
        losses, slope = of_rows(logits, labels, weights, dtype=slope_dtype)
        if bias_gradient is not None:
            bias_gradient = bias_gradient + jnp.sum(slope, axis=0)
        slope = slope.astype(x.dtype)
        head_gradient = head_gradient + jnp.matmul(x.T, slope, preferred_element_type=dtype)
        x_gradient = jnp.matmul(slope, readout.T, preferred_element_type=dtype)
        total = total + jnp.sum(losses * weights)
        return (total, head_gradient, bias_gradient), (x_gradient.astype(x.dtype), losses)

    start = (
        jnp.zeros((), dtype),
        jnp.zeros(head.shape, dtype),
        None if bias is None else jnp.zeros(bias.shape, dtype),
    )
    parts = _blocks(size, x, labels, weights)
    (total, head_gradient, bias_gradient), (x_gradient, losses) = jax.lax.scan(body, start, parts)
    tokens = x.shape[0]
    x_gradient = x_gradient.reshape(-1, x.shape[1])[:tokens]
    if bias is not None and bias_gradient is not None:
        bias_gradient = bias_gradient.astype(bias.dtype)
    gradients = _Gradients(x_gradient, head_gradient.astype(head.dtype), bias_gradient)
    return total, (gradients, losses.reshape(-1)[:tokens].astype(weights.dtype))


def _backward(size, of_rows, residuals, cotangent):
    gradients, losses = residuals
    scaled = jax.tree.map(lambda g: cotangent.astype(g.dtype) * g, (*gradients, losses))
    return *scaled[:3], None, scaled[3]


_loss = jax.custom_vjp(_value, nondiff_argnums=(0, 1))
_loss.defvjp(_forward, _backward)


def _logits(x, readout, bias) -> jax.Array:
    """The logits of one block, `[size, vocab]`."""
    logits = jnp.matmul(x, readout, preferred_element_type=compute_dtype(x.dtype))
    return logits if bias is None else logits + bias[None]


def _losses(logits, labels) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross-entropies `[size]`, probabilities and the mask of labels, `[size, vocab]`."""
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # A sum over a mask rather than a gather: it fuses with the others over the vocabulary.
    chosen = _chosen(labels, logits.shape[1])
    losses = normalizer[:, 0] - jnp.sum(jnp.where(chosen, logits, 0), axis=-1)
    return losses, jnp.exp(logits - normalizer), chosen


def _chosen(labels: jax.Array, vocab: int) -> jax.Array:
    """A mask that is true at each token's label, `[size, vocab]`."""
    return jnp.arange(vocab, dtype=labels.dtype)[None] == labels[:, None]


def _blocks(size: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """`[tokens, ...]` to `[blocks, size, ...]`, the last block filled with zeros (weight 0)."""

    def cut(x: jax.Array) -> jax.Array:
        added = -x.shape[0] % size
        x = jnp.pad(x, [(0, added)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, size, *x.shape[1:])

    return tuple(cut(x) for x in arrays)
