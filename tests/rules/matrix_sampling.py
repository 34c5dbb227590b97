"""Random tokens that fit any matrix memory."""

import jax
import jax.numpy as jnp

from fwpkm_jax.testing.matrix_rules import sample_tokens

__all__ = ["cast", "sample_tokens"]


def cast(tree, dtype):
    """The arrays of a tree as JAX arrays in `dtype`."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
