"""The causal convolution of a few taps with SiLU and unit-length heads."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import assert_results_agree
from pallas_kernels.dispatch import Backend, Kernel, implementation, module_of
from pallas_kernels.short_convolution import reference
from pallas_kernels.short_convolution.arguments import Part, channels_of
from pallas_kernels.short_convolution.specs import (
    CHECK_RATIOS,
    CHECKED,
    SPECS,
    ConvolutionSpec,
    sample,
)

OP = "short_convolution"
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
      x: `[batch, length, groups, columns]`.
      before: the `width - 1` inputs of each channel before these, oldest first.
      weight: `[width, channels]`, oldest input first.
      documents: documents that have started up to each token, from 0; a token sees only the inputs
        of its own document. None: all inputs are of one document.
      parts: the columns of a group, all of them, from the first.
      activation: of the convolution's output; a kernel has SiLU only.
      dtype: of the results with taps; None: at least float32, in which all is computed.
      backend: "auto", "reference" or "pallas".

    Returns:
      For each part `[batch, length, groups * part.width]`: group after group.

    Raises:
      ValueError: `parts` are not all columns, or `backend="pallas"` without a kernel for the
        platform.
      NotImplementedError: `backend="pallas"` with sizes or dtypes that the kernel does not take.

    References: the layers of Yang et al. 2024, arXiv:2412.06464; Dao's causal-conv1d.
    """
    parts = tuple(parts)
    _check(x, before, weight, parts)
    chosen = implementation(
        OP,
        backend,
        kernels=("gpu",),
        supports=lambda kernel: _refusal(x, before, weight, parts, activation, dtype),
        check=check_convolution,
    )
    if chosen == "reference":
        return reference.short_convolution(
            x, before, weight, documents, parts=parts, activation=activation, dtype=dtype
        )
    kernels = module_of("short_convolution", chosen)
    length, reach = x.shape[1], before.shape[1]
    fill = -length % kernels.length_step()
    seen = None if documents is None else _fill(_seen(documents, reach), fill)
    dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
    results = _run(kernels, parts, dtype, _fill(x, fill), before, weight, seen)
    return tuple(y[:, :length] for y in results)


def _fill(x: jax.Array, more: int) -> jax.Array:
    """Adds tokens of zeros at the end."""
    return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2)) if more else x


def _seen(documents: jax.Array, reach: int) -> jax.Array:
    """How many inputs before each token belong to its document, at most `reach`, int32."""
    numbers = jnp.pad(documents, ((0, 0), (reach, 0)))
    length = documents.shape[1]
    same = [numbers[:, start : start + length] == documents for start in range(reach)]
    return functools.reduce(jnp.add, [one.astype(jnp.int32) for one in same])


def _primal(kernels: Any, parts: tuple[Part, ...], dtype: Any, *arrays: Any) -> Any:
    return _forward(kernels.forward, parts, dtype, *arrays)


def _run_forward(kernels, parts, dtype, *arrays):
    return _run(kernels, parts, dtype, *arrays), arrays


def _run_backward(kernels, parts, dtype, saved, cotangents):
    del dtype  # That of the cotangents.
    _, before, weight, _ = saved
    d_x, d_before, d_weight = _backward(kernels.backward, parts, saved, cotangents)
    return d_x, d_before.astype(before.dtype), d_weight.astype(weight.dtype), None


_run = jax.custom_vjp(_primal, nondiff_argnums=(0, 1, 2))
_run.defvjp(_run_forward, _run_backward)


# `jit` traces these once for equal arguments, so a model lowers its kernels once, not per layer.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(kernel: Callable[..., Any], parts: Any, dtype: Any, *arrays: Any) -> Any:
    return kernel(*arrays, parts=parts, dtype=dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(kernel: Callable[..., Any], parts: Any, saved: Any, cotangents: Any) -> Any:
    return kernel(*saved, cotangents, parts=parts)


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


def _refusal(x, before, weight, parts, activation, dtype) -> str | None:
    """None, or why no kernel accepts these arguments."""
    from pallas_kernels.short_convolution.gpu_program import plan

    taken = (jnp.bfloat16, jnp.float32)
    for name, one in (("x", x.dtype), ("before", before.dtype), ("weight", weight.dtype)):
        if one not in taken:
            return f"{name} in {one}, only bfloat16 and float32"
    if dtype is not None and jnp.dtype(dtype) not in taken:
        return f"results in {jnp.dtype(dtype)}, only bfloat16 and float32"
    if activation is not jax.nn.silu:
        return "another activation than jax.nn.silu"
    if not 2 <= len(weight) <= WIDEST:
        return f"{len(weight)} taps per channel, only 2 to {WIDEST}"
    found = plan(x.shape[2], parts)
    return found if isinstance(found, str) else None


def compared(spec: ConvolutionSpec, dtype: DTypeLike) -> Callable[..., tuple[jax.Array, ...]]:
    """The operation on a spec's arrays, with results to compare.

    Comparisons take results as their own cotangents. A unit vector's would lie along the vector,
    and the norm passes none of that on. So results are multiplied by numbers that differ by column.
    """

    def call(**arrays: Any) -> tuple[jax.Array, ...]:
        results = short_convolution(**arrays, parts=spec.parts, dtype=dtype)
        factors = [jnp.cos(0.7 * jnp.arange(y.shape[-1], dtype=jnp.float32)) for y in results]
        return tuple(
            y * f.astype(y.dtype)[None, None] for y, f in zip(results, factors, strict=True)
        )

    return call


def check_convolution(kernel: Kernel) -> None:
    """Runs the kernels on this device; raises if they differ from the reference."""
    del kernel  # It is the one of this device.
    for name in CHECKED:
        spec = next(spec for spec in SPECS if spec.name == name)
        for dtype, ratio in CHECK_RATIOS.items():
            arrays = sample(spec, jnp.dtype(dtype))
            assert_results_agree(compared(spec, jnp.dtype(dtype)), arrays, ratio=ratio)
