"""Experts: sorted into blocks, and every expert on every token, give the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from fwpkm_jax.layers.experts import Experts, ExpertsConfig, RouterLoad, balance_loss
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.config import ModelConfig

CONFIG = ExpertsConfig(num_experts=5, top_k=2, hidden_dim=6, shared_dim=4)
DIM = 8


def every_expert(layer, x):
    """The definition: all experts on all tokens, weighted by what the router gives the chosen."""
    config, weights = layer.config, layer.router(x)
    probabilities = jax.nn.softmax(weights, axis=-1)
    lowest = jnp.sort(probabilities, axis=-1)[..., -config.top_k][..., None]
    chosen = jnp.where(probabilities >= lowest, probabilities, 0)
    if config.renormalize:
        chosen = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
    gate, up = jnp.split(jnp.einsum("bld,edh->bleh", x, layer.gate_up_kernel[...]), 2, axis=-1)
    each = jnp.einsum("bleh,ehd->bled", jax.nn.silu(gate) * up, layer.down_kernel[...])
    y = jnp.einsum("ble,bled->bld", chosen, each)
    if layer.shared is not None:
        y = y + jax.nn.sigmoid(layer.shared_gate(x)) * layer.shared(x)
    return y, chosen > 0, probabilities


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (CONFIG, (3, 11)),  # Blocks that are not full.
        (dataclasses.replace(CONFIG, renormalize=False, shared_dim=None, top_k=5), (1, 1)),
    ],
)
def test_output_load_and_gradients_are_those_of_the_definition(config, shape):
    layer = Experts(config, DIM, init_std=0.5, rngs=nnx.Rngs(0))
    # Most tokens choose alike, so that experts have very different numbers of them.
    layer.router.kernel[...] = layer.router.kernel[...] + 0.5 * jnp.eye(DIM, config.num_experts)
    graphdef, params = nnx.split(layer)
    x = 0.5 + jax.random.normal(jax.random.key(1), (*shape, DIM))
    target = jax.random.normal(jax.random.key(2), x.shape)
    axes = (1, 1, 1), ("data", "fsdp", "model"), (AxisType.Auto,) * 3
    mesh = jax.make_mesh(*axes, devices=jax.devices()[:1])

    @jax.jit
    def run(params, x):
        def loss(params, x, how):
            layer = nnx.merge(graphdef, params)
            if how == "definition":
                y, chosen, probabilities = every_expert(layer, x)
                load = RouterLoad(jnp.mean(1.0 * chosen, (0, 1)), jnp.mean(probabilities, (0, 1)))
            else:
                partition = Partition(mesh) if how == "devices" else None
                y, load = layer(x, partition=partition)
            return jnp.sum(y * target) + balance_loss({"a": load, "b": load}), (y, load)

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return {how: grad(params, x, how) for how in ("definition", "blocks", "devices")}

    results = run(params, x)
    for how in ("blocks", "devices"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
            results[how],
            results["definition"],
        )
    load = results["blocks"][0][1][1]
    np.testing.assert_allclose(np.sum(load.share), config.top_k, rtol=1e-5)
    assert np.ptp(load.share) > 0.2 or config.top_k == config.num_experts


def test_the_balance_is_least_where_experts_are_used_alike():
    even = RouterLoad(jnp.full((4,), 0.5), jnp.full((4,), 0.25))
    uneven = RouterLoad(jnp.array([1.0, 1, 0, 0]), jnp.array([0.5, 0.5, 0, 0]))
    assert float(balance_loss({"layer_0": even})) == pytest.approx(2)
    assert float(balance_loss({"layer_0": uneven})) == pytest.approx(4)


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="top_k=3 must lie between 1 and num_experts=2"):
        ExpertsConfig(num_experts=2, top_k=3)
    with pytest.raises(ValueError, match="shared_dim=0 is too small; use 1 or more"):
        ExpertsConfig(shared_dim=0)
    with pytest.raises(ValueError, match=r"pkm_layers and expert_layers share \[1\]"):
        ModelConfig(pkm_layers=(1,), expert_layers=(1,))
