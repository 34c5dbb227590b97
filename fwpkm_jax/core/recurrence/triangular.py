"""Inverses of unit lower triangular matrices, by matrix products alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_jvp
def unit_lower_inverse(lower: Float[Array, "*dims n n"]) -> Float[Array, "*dims n n"]:
    """The inverse of I + tril(lower, -1).

    Blocks of twice the size from pairs of inverted blocks, `log2(n)` times:

        [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]

    This is as stable as substitution and needs only batched products. LAPACK's batched solver is
    not used: in jaxlib 0.10.2 two of its calls at once deadlock on a machine with two cores.

    Args:
      lower: `[..., n, n]`; only the part below the diagonal is read.
    """
    size = lower.shape[-1]
    padding = (1 << (size - 1).bit_length()) - size if size > 1 else 0
    # Rows added at the end are those of the identity.
    lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, padding)] * 2)
    padded = size + padding
    inverse = jnp.ones((*lower.shape[:-2], padded, 1, 1), lower.dtype)  # [..., blocks, 1, 1]
    block = 1
    while block < padded:
        pairs = padded // (2 * block)
        split = lower.reshape(*lower.shape[:-2], pairs, 2 * block, pairs, 2 * block)
        diagonal = jnp.einsum("...prpc->...prc", split)
        corner = diagonal[..., block:, :block]  # C
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]  # A^-1, B^-1
        below = -_product(second, _product(corner, first))
        inverse = jnp.concatenate(
            [
                jnp.concatenate([first, jnp.zeros_like(first)], axis=-1),
                jnp.concatenate([below, second], axis=-1),
            ],
            axis=-2,
        )
        block *= 2
    return inverse[..., 0, :size, :size]


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    (lower,), (change,) = primals, tangents
    inverse = unit_lower_inverse(lower)
    return inverse, -_product(inverse, _product(jnp.tril(change, -1), inverse))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
