"""Layers whose decays, gates and temperatures have extreme numbers: outputs and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.layers.mixers import GatedDeltaNetConfig, TitansConfig, TitansMixerConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig, MatrixMixerConfig
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.rules.matrix import MATRIX_RULES

WIDTH = 6
SHAPE: dict[str, Any] = {
    "num_key_heads": 1,
    "num_value_heads": 2,
    "key_head_dim": 4,
    "value_head_dim": 4,
}
TITANS = TitansConfig(num_heads=2, head_dim=3, chunk_size=4)
MIXERS: dict[str, Any] = {
    **dict.fromkeys(MATRIX_RULES),
    "gdn": GatedDeltaNetConfig(**SHAPE, chunk_size=4),
    "titans": TitansMixerConfig(variant="alone", memory=TITANS),
}
# The logarithm of a rate, and what is added before a sigmoid, a softplus or an exponential.
NUMBERS = [(100.0, -200.0), (100.0, 200.0), (89.0, -95.0), (-200.0, 3e4), (0.0, 1e8), (0.0, -1e8)]
RATES = ("A_log", "log_rate")
GATES = ("decay_proj", "strength_proj", "forget_proj", "momentum_proj", "rate_proj")


def with_numbers(params, rate, bias):
    def change(path, x):
        name = jax.tree_util.keystr(path)
        if any(of in name for of in RATES):
            return jnp.full_like(x, rate)
        if "dt_bias" in name or ("bias" in name and any(of in name for of in GATES)):
            return jnp.full_like(x, bias)
        return x

    return jax.tree_util.tree_map_with_path(change, params)


def not_finite(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, x in leaves if not np.all(np.isfinite(x))]


@pytest.mark.thorough("mlstm")
@pytest.mark.parametrize("name", MIXERS)
def test_gates_of_any_size_give_finite_outputs_and_gradients(name):
    """Also with large, tiny and empty inputs."""
    config = MIXERS[name]
    if config is None:
        shape = MatrixMemoryConfig(**SHAPE, decay_rank=2)
        config = MatrixMixerConfig.named(name, shape)
    layer = config.build(WIDTH, norm_eps=1e-5, init_std=0.5, dtype=None, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, WIDTH)), jnp.float32)

    @jax.jit
    def output_and_gradients(params, x):
        def loss(params, x):
            y = nnx.merge(graph, params)(x)[0]
            return jnp.sum(y**2 / (1 + jnp.abs(y))), y

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    sizes = (1.0, 1e-12, 0.0) if name == "titans" else (1.0, 1e4, 1e-12, 0.0)
    for rate, bias in NUMBERS:
        for size in sizes:
            found = output_and_gradients(with_numbers(params, rate, bias), size * x)
            assert not not_finite(found), (rate, bias, size)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1e-37, 1e37])
def test_slots_of_any_temperature_give_finite_outputs_and_gradients(temperature):
    rule = FwPKM(num_subkeys=4, key_dim=8, value_dim=8, top_k=2, temperature=temperature)
    layer = FastWeight(FastWeightConfig(rule=rule, chunk_size=4), WIDTH, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    memory = rule.init(jax.random.key(0))
    memory = jax.tree.map(lambda x: x[None], memory)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, WIDTH)), jnp.float32)

    @jax.jit
    def output_and_gradients(params, x):
        def loss(params, x):
            y, written, _ = nnx.merge(graph, params)(x, memory)
            return jnp.sum(y**2), (y, written)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    for size in (1e4, 1e-12, 0.0):
        assert not not_finite(output_and_gradients(params, size * x)), size
