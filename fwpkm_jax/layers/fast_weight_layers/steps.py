"""Gradient steps on all earlier tokens, as linear attention: what a Fast Weight Layer computes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.numerics import layer_normalize


class HeadTensors(NamedTuple):
    """The layer's tensors, or as many of anything: `LN(ReLU(x up + up_bias)^2 down + down_bias)`
    with the norm's `scale` and `shift`."""

    up: Any
    up_bias: Any
    down: Any
    down_bias: Any
    scale: Any
    shift: Any


class TokenGradients(NamedTuple):
    """The gradients of a token's loss after each tensor, and the inputs of the matrices.

    Attributes:
      x: `[batch, length, model]`, the input of `up`.
      hidden: `[batch, length, hidden]`, the input of `down`.
      up: gradient of the output of `up`, which is also that of `up_bias`.
      down: gradient of the output of `down`, which is also that of `down_bias`.
      scale: gradient of `scale`.
      shift: gradient of `shift`.
    """

    x: jax.Array
    hidden: jax.Array
    up: jax.Array
    down: jax.Array
    scale: jax.Array
    shift: jax.Array


class Sums(NamedTuple):
    """A tensor's gradients, summed, leaves `[batch, *tensor]`.

    Attributes:
      current: of the segment that is being read.
      earlier: of the segments before, decayed; None without segments.
    """

    current: jax.Array
    earlier: jax.Array | None


class Step(NamedTuple):
    """How a tensor moves: its step size, and the share of older segments' steps that it keeps."""

    rate: Float[Array, ""]
    decay: Float[Array, ""] | None


class Segments(NamedTuple):
    """Where a chunk stands.

    Attributes:
      of_token: number of each token's segment, `[batch, length]`.
      current: of the segment that `Sums.current` belong to, `[batch]`.
      documents: documents that have started in the chunk up to each token, whose steps end with
        them; None: none starts.
    """

    of_token: Int[Array, "batch length"]
    current: Int[Array, " batch"]
    documents: Int[Array, "batch length"] | None = None


def apply_head(
    tensors: HeadTensors, x: Float[Array, "*n model"], beside: TokenGradients | None = None
) -> tuple[Float[Array, "*n model"], Float[Array, "*n hidden"]]:
    """The layer's output, and the input of `down`; `beside` is added after each tensor."""

    def plus(y: jax.Array, name: str) -> jax.Array:
        return y if beside is None else y + getattr(beside, name)

    before = plus(x @ tensors.up + tensors.up_bias[None, None], "up")
    hidden = jnp.square(jax.nn.relu(before))
    y = plus(hidden @ tensors.down + tensors.down_bias[None, None], "down")
    scale = plus(jnp.broadcast_to(tensors.scale, y.shape), "scale")
    shift = plus(jnp.broadcast_to(tensors.shift, y.shape), "shift")
    return layer_normalize(y) * scale + shift, hidden


def token_gradients(
    tensors: HeadTensors,
    readout: tuple[jax.Array, jax.Array | None],
    x: Float[Array, "batch length model"],
    labels: Int[Array, "batch length"],
    counted: Float[Array, "batch length"],
) -> TokenGradients:
    """Gradients of each token's cross-entropy at the slow tensors, times its weight `counted`."""

    def loss(beside: TokenGradients) -> tuple[jax.Array, jax.Array]:
        y, hidden = apply_head(tensors, x, beside)
        logits = head_logits(y, readout)
        right = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jnp.sum(counted * (jax.nn.logsumexp(logits, axis=-1) - right)), hidden

    # Added zeros: the gradient after each tensor is the gradient of what is added there.
    narrow, wide = jnp.zeros_like(x), jnp.zeros((*x.shape[:2], tensors.up.shape[1]), x.dtype)
    nothing = TokenGradients(narrow, wide, wide, narrow, narrow, narrow)
    gradients, hidden = jax.grad(loss, has_aux=True)(nothing)
    return gradients._replace(x=x, hidden=hidden)


def head_logits(
    y: Float[Array, "batch length model"], readout: tuple[jax.Array, jax.Array | None]
) -> Float[Array, "batch length vocab"]:
    """The head's logits in the dtype of `y`."""
    head, bias = readout
    logits = y @ head.astype(y.dtype)
    return logits if bias is None else logits + bias.astype(y.dtype)[None, None]


def advance_head(
    tensors: HeadTensors,
    steps: HeadTensors,
    sums: HeadTensors,
    x: Float[Array, "batch length model"],
    tokens: TokenGradients,
    segments: Segments,
) -> tuple[HeadTensors, Float[Array, "batch length model"]]:
    """A chunk's outputs, each with the gradients of all tokens before it, and the sums after it.

    Args:
      tensors: slow.
      steps: a `Step` for each tensor.
      sums: a `Sums` for each tensor, of the tokens before the chunk.
      x: the input of `up`.
    """
    # Tensor by tensor, because each reads what the moved ones before it made.
    up, up_sums = move_matrix(steps.up, x, tokens.x, tokens.up, sums.up, segments)
    up_bias, up_bias_sums = move_vector(steps.up_bias, tokens.up, sums.up_bias, segments)
    before = x @ tensors.up + tensors.up_bias[None, None] + up + up_bias
    hidden = jnp.square(jax.nn.relu(before))
    down, down_sums = move_matrix(
        steps.down, hidden, tokens.hidden, tokens.down, sums.down, segments
    )
    down_bias, down_bias_sums = move_vector(steps.down_bias, tokens.down, sums.down_bias, segments)
    y = hidden @ tensors.down + tensors.down_bias[None, None] + down + down_bias
    scale, scale_sums = move_vector(steps.scale, tokens.scale, sums.scale, segments)
    shift, shift_sums = move_vector(steps.shift, tokens.shift, sums.shift, segments)
    # Each step moves its tensor by what all earlier tokens' gradients add up to.
    out = layer_normalize(y) * (tensors.scale[None, None] + scale) + tensors.shift[None, None]
    after = HeadTensors(up_sums, up_bias_sums, down_sums, down_bias_sums, scale_sums, shift_sums)
    return after, out + shift


def move_matrix(
    step: Step,
    asks: Float[Array, "batch length wide"],
    answers: Float[Array, "batch length wide"],
    gradients: Float[Array, "batch length narrow"],
    sums: Sums,
    segments: Segments,
) -> tuple[Float[Array, "batch length narrow"], Sums]:
    """What a matrix's steps add to its output, by strictly causal linear attention; and its sums.

    Args:
      asks: the tokens' inputs to the matrix now.
      answers: their inputs when the gradients were taken.
      sums: `[batch, wide, narrow]`.
    """

    def between(weights: jax.Array) -> jax.Array:
        # As attention without a softmax: no matrix of steps is formed for each token.
        return ((asks @ jnp.swapaxes(answers, 1, 2)) * weights) @ gradients

    def added(weights: jax.Array) -> jax.Array:
        return jnp.swapaxes(answers * weights[..., None], 1, 2) @ gradients

    return _move(step, sums, segments, lambda total: asks @ total, between, added)


def move_vector(
    step: Step, gradients: Float[Array, "batch length width"], sums: Sums, segments: Segments
) -> tuple[Float[Array, "batch length width"], Sums]:
    """What the steps of a vector that is added to all tokens add to it, and its sums."""

    def added(weights: jax.Array) -> jax.Array:
        return jnp.sum(gradients * weights[..., None], axis=1)

    return _move(
        step,
        sums,
        segments,
        lambda total: total[:, None],
        lambda weights: weights @ gradients,
        added,
    )


def _move(
    step: Step,
    sums: Sums,
    segments: Segments,
    read: Callable[[jax.Array], jax.Array],
    between: Callable[[jax.Array], jax.Array],
    added: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, Sums]:
    """The steps that a chunk's tokens see, and the sums behind it.

    Args:
      sums: of the tokens before.
      read: from a sum to what it adds to each token.
      between: the same of the chunk's own gradients, from the weight of each for each token
        `[batch or 1, length, length]`.
      added: the sum of the chunk's gradients by their weights `[batch, length]`.
    """
    index, decay = segments.of_token, step.decay
    # Strictly below the diagonal: a token's own step is not among those it reads.
    earlier = jnp.tri(index.shape[1], k=-1, dtype=sums.current.dtype)[None]
    goes_on, last_one = jnp.ones_like(earlier[:, 0]), jnp.ones_like(earlier[:, 0])
    if (numbers := segments.documents) is not None:
        earlier = earlier * (numbers[:, :, None] == numbers[:, None, :])
        goes_on = (numbers == 0).astype(earlier.dtype)
        last_one = (numbers == numbers[:, -1:]).astype(earlier.dtype)

    def of(weights: jax.Array, total: jax.Array) -> jax.Array:
        return weights.reshape(-1, *[1] * (total.ndim - 1)) * total

    if decay is None or sums.earlier is None:
        seen = goes_on[..., None] * read(sums.current) + between(earlier)
        return -step.rate * seen, Sums(of(goes_on[:, -1], sums.current) + added(last_one), None)

    def power(number: jax.Array) -> jax.Array:
        return decay ** number.astype(sums.current.dtype)

    def kept(ago: jax.Array) -> jax.Array:
        """Of a segment so many back: its own and the last one whole."""
        return power(jnp.maximum(ago - 1, 0))

    # A document counts its segments from 0, which may be less than the one before it had.
    since = jnp.where(goes_on > 0, index - segments.current[:, None], index)
    seen = (goes_on * kept(since))[..., None] * read(sums.current)
    seen += (goes_on * power(since))[..., None] * read(sums.earlier)
    seen += between(earlier * kept(index[:, :, None] - index[:, None, :]))
    last, ends_on = since[:, -1], goes_on[:, -1]
    stays = last == 0
    behind = since < last[:, None]
    # When a segment ends, its sum joins those of earlier ones, which fade once more.
    past = of(ends_on * power(last), sums.earlier)
    past += of(ends_on * jnp.where(stays, 0.0, kept(last)), sums.current)
    past += added(last_one * jnp.where(behind, kept(last[:, None] - since), 0.0))
    current = of(ends_on * stays, sums.current) + added(last_one * jnp.where(behind, 0.0, 1.0))
    return -step.rate * seen, Sums(current, past)
