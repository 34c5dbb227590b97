"""The memory block that its tests share, its parameters, and how they compare."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.rules import FwPKM

MODEL, BATCH, LENGTH, CHUNK = 6, 2, 8, 3
CONFIG = FastWeightConfig(
    rule=FwPKM(num_subkeys=4, key_dim=6, value_dim=5, num_heads=2, top_k=2), chunk_size=CHUNK
)


@functools.cache
def build(config=CONFIG):
    """The layer's structure and its parameters, every one away from where it starts."""
    layer = FastWeight(config, MODEL, norm_eps=1e-5, init_std=0.5, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    noise = np.random.default_rng(0)
    return graphdef, jax.tree.map(
        lambda x: np.asarray(x) + 0.1 * noise.normal(size=x.shape), params
    )


@functools.partial(jax.jit, static_argnames=("config", "write"))
def whole(params, x, memory, mask=None, *, config=CONFIG, write=True):
    return nnx.merge(build(config)[0], params)(x, memory, mask=mask, write=write)


def params_of(config=CONFIG):
    return jax.tree.map(jnp.asarray, build(config)[1])


def layer_of(params, config=CONFIG):
    return nnx.merge(build(config)[0], params)


def start(*, groups=1, config=CONFIG):
    memory = layer_of(params_of(config), config).init_memory(jax.random.key(1), groups=groups)
    return jax.tree.map(lambda x: x.astype(jnp.float64), memory)


def sample(length=LENGTH, batch=BATCH, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, length, MODEL)))


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-11)
