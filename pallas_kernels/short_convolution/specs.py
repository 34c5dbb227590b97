"""Named shapes of the short convolution."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fwpkm_jax.core.documents import document_numbers
from pallas_kernels.short_convolution.api import short_convolution
from pallas_kernels.short_convolution.arguments import Part, channels_of
from pallas_kernels.spec import Comparison, Spec


@dataclass(frozen=True, kw_only=True)
class ConvolutionSpec(Spec):
    """Sizes of one call."""

    batch: int = 1
    length: int
    groups: int = 8
    parts: tuple[Part, ...]
    width: int = 4
    """Taps per channel."""
    documents: float = 0.0
    """Share of the tokens that start a document; 0: one document."""


def heads(key: int, value: int) -> tuple[Part, ...]:
    """The columns of a key head in Gated DeltaNet's projection: query, key, values, gates."""
    return Part(key, key), Part(key, key), Part(value), Part(value, convolved=False)


SPECS = (
    ConvolutionSpec(name="one_token", length=1, parts=heads(64, 64)),
    ConvolutionSpec(name="two_taps", length=9, parts=heads(64, 64), width=2),
    ConvolutionSpec(
        name="packed",
        length=12,
        parts=(Part(64, 64), Part(64), Part(64, convolved=False)),
        documents=0.3,
    ),
    ConvolutionSpec(name="20_tokens", length=20, parts=heads(64, 64)),
    ConvolutionSpec(
        name="flat",
        length=12,
        groups=1,
        parts=(Part(512, 64), Part(1024), Part(512, convolved=False)),
        documents=0.2,
    ),
    ConvolutionSpec(name="wide_values", length=10, groups=4, parts=heads(128, 256)),
    ConvolutionSpec(
        name="100_tokens", batch=2, length=100, parts=heads(64, 64), documents=0.1, small=False
    ),
    ConvolutionSpec(
        name="several_tiles", batch=3, length=320, parts=heads(64, 64), documents=0.02, small=False
    ),
    ConvolutionSpec(name="wide", length=256, groups=16, parts=heads(128, 128), small=False),
    ConvolutionSpec(
        name="wide_packed",
        length=256,
        groups=4,
        parts=heads(128, 256),
        documents=0.05,
        small=False,
        compiled=True,
    ),
    ConvolutionSpec(
        name="paper", batch=8, length=4096, parts=heads(64, 64), small=False, compiled=True
    ),
    ConvolutionSpec(
        name="paper_packed",
        batch=8,
        length=4096,
        parts=heads(64, 64),
        documents=0.002,
        small=False,
        compiled=True,
    ),
)


def sample(spec: ConvolutionSpec, dtype: DTypeLike) -> dict[str, jax.Array]:
    """Random arguments; all but the taps have `dtype`."""
    rngs = iter(jax.random.split(jax.random.key(spec.length), 4))
    columns = sum(part.width for part in spec.parts)
    places = channels_of(spec.parts, spec.groups)
    channels = sum(place.stop - place.start for place in places if place is not None)

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(rngs), shape, jnp.float32)

    arrays = {
        "x": normal(spec.batch, spec.length, spec.groups, columns).astype(dtype),
        "before": normal(spec.batch, spec.width - 1, channels).astype(dtype),
        "weight": normal(spec.width, channels),
    }
    if spec.documents:
        draws = jax.random.uniform(next(rngs), (spec.batch, spec.length))
        arrays["documents"] = document_numbers(draws < spec.documents)
    return arrays


def call(spec: ConvolutionSpec, dtype: DTypeLike, **arrays: Any) -> tuple[jax.Array, ...]:
    """The operation on a spec's arrays, with results to compare.

    Comparisons take results as their own cotangents. A unit vector's would lie along the vector,
    and the norm passes none of that on. So results are multiplied by numbers that differ by column.
    """
    results = short_convolution(**arrays, parts=spec.parts, dtype=dtype)
    factors = [jnp.cos(0.7 * jnp.arange(y.shape[-1], dtype=jnp.float32)) for y in results]
    return tuple(y * f.astype(y.dtype)[None, None] for y, f in zip(results, factors, strict=True))


COMPARISON = Comparison(
    specs=SPECS,
    sample=sample,
    call=call,
    # A length that no tile divides, and several tiles, so that each edge between tiles occurs.
    checked=("100_tokens", "several_tiles"),
    # Rounding a number to bfloat16 changes it by up to 2^-9 of itself.
    ratios={"float32": 1e-5, "bfloat16": 1e-2},
)
