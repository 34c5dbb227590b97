"""Maps of queries and keys into the space where a matrix memory compares them."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.core.numerics import compute_dtype, l2_normalize

FeatureMap = Literal["identity", "l2", "silu", "silu_l2", "elu", "sigmoid", "random"]


def _random(x: jax.Array) -> jax.Array:
    """`sqrt(2 / d) ReLU(x w)` of unit vectors, fixed normal w: their products estimate the
    arc-cosine kernel (Peng et al. 2021, arXiv:2103.02143, section 3.1)."""
    x = l2_normalize(x)
    directions = _directions(x.shape[-1]).astype(x.dtype)
    return jax.nn.relu(jnp.matmul(x, directions, precision=jax.lax.Precision.HIGHEST))


@functools.cache
def _directions(width: int) -> np.ndarray:
    """The same on every machine and in every run; part of no checkpoint."""
    return np.random.default_rng(0).normal(size=(width, width)) * (2 / width) ** 0.5


FEATURE_MAPS: dict[FeatureMap, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x.astype(compute_dtype(x.dtype)),
    "l2": l2_normalize,
    "silu": lambda x: jax.nn.silu(x.astype(compute_dtype(x.dtype))),
    # Of the published DeltaNet layers, arXiv:2406.06484.
    "silu_l2": lambda x: l2_normalize(jax.nn.silu(x.astype(compute_dtype(x.dtype)))),
    # Positive (Katharopoulos et al. 2020, arXiv:2006.16236).
    "elu": lambda x: jax.nn.elu(x.astype(compute_dtype(x.dtype))) + 1,
    "sigmoid": lambda x: jax.nn.sigmoid(x.astype(compute_dtype(x.dtype))),
    "random": _random,
}
POSITIVE: tuple[FeatureMap, ...] = ("elu", "sigmoid", "random")
"""Maps whose products are never negative, which a normalised read needs."""
