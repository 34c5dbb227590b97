"""Named shapes of gated mixes with their norms."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.mix_rms_norm.api import mix_rms_norm
from pallas_kernels.spec import Comparison, Spec


@dataclass(frozen=True, kw_only=True)
class MixSpec(Spec):
    """Sizes of one call, and how the rows of `x` lie."""

    batch: int = 1
    length: int
    width: int
    sequences: int = 1
    chunk_size: int | None = None
    eps: float = 1e-5


SPECS = (
    MixSpec(name="one_token", length=1, width=128),
    MixSpec(name="63_tokens", batch=3, length=21, width=256),
    MixSpec(name="by_chunks", batch=4, length=6, width=128, sequences=2, chunk_size=3),
    MixSpec(name="100_tokens", length=100, width=512, small=False),
    MixSpec(name="widest", batch=2, length=600, width=1024, small=False, compiled=True),
    MixSpec(
        name="paper",
        batch=8,
        length=4096,
        width=512,
        sequences=8,
        chunk_size=512,
        small=False,
        compiled=True,
    ),
)


def sample(spec: MixSpec, dtype: DTypeLike) -> dict[str, jax.Array]:
    """The arrays of one call, in float32 for results in any `dtype`."""
    rngs = jax.random.split(jax.random.key(spec.width), 3)
    shape = (spec.batch, spec.length, spec.width)
    return {
        "x": 2 * jax.random.normal(rngs[0], shape, jnp.float32),
        "y": jax.random.normal(rngs[1], shape, jnp.float32),
        "gate": jax.nn.sigmoid(2 * jax.random.normal(rngs[2], shape[:2], jnp.float32)),
    }


def call(spec: MixSpec, dtype: DTypeLike, **arrays: Any) -> jax.Array:
    """`mix_rms_norm` of such arrays, results in `dtype` with a factor for each column.

    Without factors, results taken for cotangents are cotangents of length alone, which cancel.
    """
    how: Any = {"sequences": spec.sequences, "chunk_size": spec.chunk_size}
    normed = mix_rms_norm(**arrays, eps=spec.eps, dtype=dtype, **how)
    return normed * jnp.linspace(1.0, 2.0, spec.width, dtype=normed.dtype)[None, None]


COMPARISON = Comparison(
    specs=SPECS,
    sample=sample,
    call=call,
    checked=("100_tokens", "paper"),
    # A result that is rounded to a neighbour is another cotangent there.
    ratios={"float32": 1e-5, "bfloat16": 8e-3},
)
