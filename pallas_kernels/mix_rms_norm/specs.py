"""Named shapes of gated mixes with their norms."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.spec import Spec


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
CHECKED = ("100_tokens", "paper")
"""Compared with the reference on a device before the first use there."""
CHECK_RATIOS = {"float32": 1e-5, "bfloat16": 8e-3}
"""Largest differences allowed in that comparison, relative to an array's norm, by the result's
dtype: a result that is rounded to a neighbour is another cotangent there."""


def sample(spec: MixSpec, dtype: DTypeLike) -> dict[str, jax.Array]:
    """The arrays of one call, in float32 for results in any `dtype`."""
    del dtype
    rngs = jax.random.split(jax.random.key(spec.width), 3)
    shape = (spec.batch, spec.length, spec.width)
    return {
        "x": 2 * jax.random.normal(rngs[0], shape, jnp.float32),
        "y": jax.random.normal(rngs[1], shape, jnp.float32),
        "gate": jax.nn.sigmoid(2 * jax.random.normal(rngs[2], shape[:2], jnp.float32)),
    }
