"""Random tokens that fit any matrix memory."""

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.rules.matrix import AbstractMatrixRule, Tokens
from fwpkm_jax.rules.matrix.features import POSITIVE


def sample_tokens(
    rule: AbstractMatrixRule, *, batch=2, length=7, heads=2, key=4, value=3, seed=0
) -> Tokens:
    """Float64 NumPy tokens: unit keys and values, decays from almost none to almost all."""
    rng = np.random.default_rng(seed)

    def unit(*shape):
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    query, keys = unit(batch, length, heads, key), unit(batch, length * rule.steps, heads, key)
    if rule.feature_map in POSITIVE:
        query, keys = np.abs(query), np.abs(keys)
    log_decay, strength = None, None
    if rule.decay != "none":
        shape = (batch, length, heads) + (key,) * (rule.decay == "key")
        log_decay = -(rng.exponential(size=shape) ** 3)
    if rule.strength:
        strength = rng.uniform(0, 2, size=keys.shape[:3])
        if rule.no_strength == -np.inf:
            strength = 3 * rng.normal(size=keys.shape[:3])
    values = unit(*keys.shape[:3], value)
    return Tokens(query, keys, values, log_decay, strength)


def cast(tree, dtype):
    """The arrays of a tree as JAX arrays in `dtype`."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
