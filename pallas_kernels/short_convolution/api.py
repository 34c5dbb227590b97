"""The causal convolution of a few taps with SiLU and unit-length heads."""

import functools
from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.numerics import l2_normalize
from fwpkm_jax.core.sequence.convolution import causal_convolution
from pallas_kernels.dispatch import Backend, Kernel, Operation, module_of, run_kernels
from pallas_kernels.refusals import FLOATS, refusal
from pallas_kernels.short_convolution.arguments import Part, channels_of, joined_inputs, parts_of

WIDEST = 8
"""Taps per channel, at most, for a kernel: it keeps them in registers."""


def short_convolution(
    x: Float[Array, "batch length groups columns"],
    before: Float[Array, "batch reach channels"],
    weight: Float[Array, "width channels"],
    *,
    documents: Int[Array, "batch length"] | None = None,
    parts: Sequence[Part],
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    dtype: DTypeLike | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Array, "batch length _"], ...]:
    """Queries, keys and values from their projection: each channel's own short convolution.

        y[t] = activation(sum_j weight[j] * x[t - width + 1 + j])
        of a head: y / sqrt(sum(y^2) + 1e-6)

    A projection yields groups, such as key heads, of the same columns. `parts` says which columns
    of every group belong together; the channels of `before` and `weight` are all columns of the
    first part with taps, group after group, then those of the second, and so on. A kernel reads the
    projection in place and writes its cotangent in place, with those of parts that pass through, so
    that no array is split or joined.

    Args:
      before: the `width - 1` inputs of each channel before these, oldest first.
      weight: `[width, channels]`, oldest input first.
      documents: documents that have started up to each token, from 0; a token sees only the inputs
        of its own document. None: all inputs are of one document.
      parts: the columns of a group, all of them, from the first.
      activation: of the convolution's output; a kernel has SiLU only.
      dtype: of the results with taps; None: at least float32, in which all is computed.
      backend: as of `dispatch.Operation.choose`, errors included.

    Returns:
      For each part `[batch, length, groups * part.width]`: group after group.

    Raises:
      ValueError: `parts` are not all columns.

    References: the layers of Yang et al. 2024, arXiv:2412.06464; Dao's causal-conv1d.
    """
    parts = tuple(parts)
    _check(x, before, weight, parts)
    chosen = SHORT_CONVOLUTION.choose(backend, x, before, weight, parts, activation, dtype)
    if chosen == "reference":
        mixed = activation(causal_convolution(joined_inputs(x, parts), before, weight, documents))
        return _as_parts(x, mixed, parts, dtype)
    kernels = module_of("short_convolution", chosen)
    length, reach = x.shape[1], before.shape[1]
    fill = -length % kernels.length_step()
    seen = None if documents is None else _fill(_seen(documents, reach), fill)
    dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
    arrays = _fill(x, fill), before, weight, seen
    return tuple(y[:, :length] for y in run_kernels(kernels, *arrays, parts=parts, dtype=dtype))


def _as_parts(
    x: jax.Array, mixed: jax.Array, parts: Sequence[Part], dtype: DTypeLike | None
) -> tuple[jax.Array, ...]:
    """The result of each part, from what the convolution makes of the channels with taps."""
    results = []
    for y, part, place in zip(
        parts_of(x, parts), parts, channels_of(parts, x.shape[2]), strict=True
    ):
        if place is not None:
            y = mixed[..., place.start : place.stop]
            if part.head is not None:
                y = l2_normalize(y.reshape(*y.shape[:2], -1, part.head)).reshape(y.shape)
            y = y if dtype is None else y.astype(dtype)
        results.append(y)
    return tuple(results)


def _fill(x: jax.Array, more: int) -> jax.Array:
    """Adds tokens of zeros at the end."""
    return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2)) if more else x


def _seen(documents: jax.Array, reach: int) -> jax.Array:
    """How many inputs before each token belong to its document, at most `reach`, int32."""
    numbers = jnp.pad(documents, ((0, 0), (reach, 0)))
    length = documents.shape[1]
    same = [numbers[:, start : start + length] == documents for start in range(reach)]
    return functools.reduce(jnp.add, [one.astype(jnp.int32) for one in same])


def _check(x: jax.Array, before: jax.Array, weight: jax.Array, parts: Sequence[Part]) -> None:
    """Raises ValueError unless the shapes and the parts fit together."""
    chex.assert_rank([x, before, weight], [4, 3, 2])
    columns = sum(part.width for part in parts)
    if columns != x.shape[3]:
        raise ValueError(
            f"parts have {columns} columns of the {x.shape[3]} of x; name all of them."
        )
    for part in parts:
        if part.head is not None and (part.width % part.head or not part.convolved):
            raise ValueError(f"{part}: head must divide the width of a part with taps.")
    channels = sum(place.stop - place.start for place in channels_of(parts, x.shape[2]) if place)
    chex.assert_shape(weight, (None, channels))
    chex.assert_shape(before, (x.shape[0], len(weight) - 1, channels))


def _refuses(
    _: Kernel,
    x: jax.Array,
    before: jax.Array,
    weight: jax.Array,
    parts: tuple[Part, ...],
    activation: Callable[[jax.Array], jax.Array],
    dtype: DTypeLike | None,
) -> str | None:
    from pallas_kernels.short_convolution.gpu_program import plan

    result = jnp.dtype(jnp.float32 if dtype is None else dtype)
    dtypes = {"x": x.dtype, "before": before.dtype, "weight": weight.dtype, "results": result}
    found = refusal(
        *(
            (one not in FLOATS, f"{name} in {one}, only bfloat16 and float32")
            for name, one in dtypes.items()
        ),
        (activation is not jax.nn.silu, "another activation than jax.nn.silu"),
        (not 2 <= len(weight) <= WIDEST, f"{len(weight)} taps per channel, only 2 to {WIDEST}"),
    )
    planned = plan(x.shape[2], parts)
    return found or (planned if isinstance(planned, str) else None)


SHORT_CONVOLUTION = Operation("short_convolution", _refuses, kernels=("gpu",))
