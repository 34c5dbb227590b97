"""Causal convolutions of a few taps, one per channel, and the inputs that the next piece needs."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.padding import last_rows
from fwpkm_jax.core.sequence.axis import SequenceAxis, positions_of_part
from fwpkm_jax.core.sequence.halo import halo_exchange


def causal_convolution(
    x: Float[Array, "batch length channels"],
    before: Float[Array, "batch reach channels"],
    weight: Float[Array, "width channels"],
    documents: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch length channels"]:
    """Each channel's own weighted sum over its last `width` inputs, in at least float32.

    Args:
      before: the `width - 1` inputs before these, oldest first.
      weight: `[width, channels]`, oldest input first.
      documents: documents that have started up to each token, from 0; a token sees only the inputs
        of its own document. None: all inputs are of one document.
    """
    dtype = compute_dtype(x.dtype, weight.dtype)
    inputs = jnp.concatenate([before.astype(dtype), x.astype(dtype)], axis=1)
    taps = weight.astype(dtype)[:, None, None, :]
    length = x.shape[1]
    numbers = None if documents is None else _numbers(documents, before.shape[1])

    def seen(start: int) -> Float[Array, "batch length channels"]:
        earlier = inputs[:, start : start + length]
        if numbers is None or documents is None:
            return earlier
        same = numbers[:, start : start + length] == documents
        return jnp.where(same[:, :, None], earlier, 0)

    # Shifted copies: XLA fuses a few taps, and each token can leave earlier documents out.
    return sum(
        (tap * seen(start) for start, tap in enumerate(taps)), start=jnp.zeros(x.shape, dtype)
    )


def convolution_inputs(
    before: Float[Array, "batch reach channels"],
    x: Float[Array, "batch length channels"],
    counts: Int[Array, " batch"] | None,
    documents: Int[Array, "batch length"] | None,
) -> Float[Array, "batch reach channels"]:
    """The inputs to keep for the next piece of a stream, zeros for those of earlier documents.

    Args:
      before: the inputs kept before.
      x: the piece, real tokens first.
      counts: real tokens of each sequence; None: all.
      documents: as in `causal_convolution`.
    """
    reach = before.shape[1]
    inputs = jnp.concatenate([before, x.astype(before.dtype)], axis=1)
    if documents is not None:
        last = jnp.max(documents, axis=1)[:, None]
        inputs = jnp.where((_numbers(documents, reach) == last)[:, :, None], inputs, 0)
    return last_rows(inputs, size=reach, end=None if counts is None else reach + counts)


def inputs_before(
    x: Float[Array, "batch length channels"],
    first: Float[Array, "batch reach channels"],
    starts: Bool[Array, "batch length"] | None,
    *,
    axis: SequenceAxis,
    counts: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch reach channels"]:
    """The inputs right before a device's part of each sequence, zeros for earlier documents'.

    Args:
      first: those kept from before the whole sequence.
      starts: first tokens of documents, of this part; None: a sequence is one document.
      counts: real tokens of the part, which come first; None: all are real.
    """
    if starts is None:
        return halo_exchange(x, first, axis=axis, counts=counts)
    numbers = positions_of_part(starts, axis=axis, shape=starts.shape).numbers
    assert numbers is not None, "starts give numbers"
    no_document = jnp.zeros(first.shape[:2], numbers.dtype)
    inputs, numbers = halo_exchange((x, numbers), (first, no_document), axis=axis, counts=counts)
    return jnp.where((numbers == numbers[:, -1:])[:, :, None], inputs, 0)


def _numbers(documents: Int[Array, "batch length"], before: int) -> Int[Array, "batch inputs"]:
    """The documents' numbers, preceded by 0 for each input kept before."""
    return jnp.pad(documents, ((0, 0), (before, 0)))
