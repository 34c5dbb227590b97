"""Norms of vectors along the last axis, computed in at least float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.precision import compute_dtype


def l2_normalize(x: Float[Array, "*dims"], *, eps: float = 1e-6) -> Float[Array, "*dims"]:
    """Vectors of (almost) unit length: `x / sqrt(sum(x^2) + eps)`.

    A zero vector stays zero and has a finite gradient.
    """
    x = x.astype(compute_dtype(x.dtype))
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


def unit_normalize(x: Float[Array, "*dims"], *, shortest: float = 1e-12) -> Float[Array, "*dims"]:
    """`x / max(norm(x), shortest)`: unit length, however short the vector; a zero stays zero."""
    x = x.astype(compute_dtype(x.dtype))
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, shortest**2))


def rms_normalize(x: Float[Array, "*dims"], *, eps: float) -> Float[Array, "*dims"]:
    """`x / sqrt(mean(x^2) + eps)`."""
    x = x.astype(compute_dtype(x.dtype))
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def layer_normalize(x: Float[Array, "*dims"], *, eps: float = 1e-5) -> Float[Array, "*dims"]:
    """`rms_normalize` of `x` minus its mean."""
    x = x.astype(compute_dtype(x.dtype))
    return rms_normalize(x - jnp.mean(x, axis=-1, keepdims=True), eps=eps)
