"""The dtype that sums and softmaxes are computed in, and norms of vectors along the last axis.

It is at least float32, however narrow the activations are; a caller casts once at the end.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

_STD_EPSILON = 1e-6
_SHORTEST = 1e-12


def compute_dtype(*dtypes: DTypeLike) -> jnp.dtype:
    """float64 if one of the dtypes is float64, else float32, also for bfloat16 activations.

    Unlike `jnp.promote_types`, this also works where implicit promotion is forbidden.
    """
    wide = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def l2_normalize(x: Float[Array, "*dims"], *, eps: float = 1e-6) -> Float[Array, "*dims"]:
    """Vectors of (almost) unit length: `x / sqrt(sum(x^2) + eps)`.

    A zero vector stays zero and has a finite gradient.
    """
    x = x.astype(compute_dtype(x.dtype))
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


def unit_normalize(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """`x / max(norm(x), 1e-12)`: unit length, however short the vector; a zero stays zero."""
    x = x.astype(compute_dtype(x.dtype))
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, _SHORTEST**2))


def rms_normalize(x: Float[Array, "*dims"], *, eps: float) -> Float[Array, "*dims"]:
    """`x / sqrt(mean(x^2) + eps)`."""
    x = x.astype(compute_dtype(x.dtype))
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def layer_normalize(x: Float[Array, "*dims"], *, eps: float = 1e-5) -> Float[Array, "*dims"]:
    """`rms_normalize` of `x` minus its mean."""
    x = x.astype(compute_dtype(x.dtype))
    return rms_normalize(x - jnp.mean(x, axis=-1, keepdims=True), eps=eps)


def standardize(x: Float[Array, "... features"]) -> Float[Array, "... features"]:
    """Zero mean and unit variance over the features, by the unbiased deviation (plus 1e-6)."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    features = x.shape[-1]
    variance = jnp.sum(centred**2, axis=-1, keepdims=True) / (features - 1)
    # The square root's slope is infinite at 0, where a constant vector would give NaN gradients.
    deviation = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
    return centred / (deviation + _STD_EPSILON)
