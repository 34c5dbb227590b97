"""Norms against their formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.core.platform import compiled_for
from fwpkm_jax.layers.lora import LoRAConfig, LoRALinear
from fwpkm_jax.layers.norms import GatedRMSNorm, RMSNorm, normed_maps
from pallas_kernels.checks import relative_errors


def test_rms_norm_multiplies_by_one_plus_its_weight():
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    norm = RMSNorm(8, eps=1e-2)
    unit = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-2)
    np.testing.assert_allclose(norm(jnp.asarray(x)), unit, rtol=1e-6)
    norm.weight.set_value(jnp.full((8,), 0.5))
    np.testing.assert_allclose(norm(jnp.asarray(x)), 1.5 * unit, rtol=1e-6)


def test_gated_rms_norm_multiplies_by_its_weight_and_silu_of_the_gate():
    rng = np.random.default_rng(0)
    x, gate = (rng.normal(size=(2, 3, 8)).astype(np.float32) for _ in range(2))
    norm = GatedRMSNorm(8, eps=1e-2)
    expected = (
        x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-2) * gate / (1 + np.exp(-gate))
    )
    np.testing.assert_allclose(norm(jnp.asarray(x), jnp.asarray(gate)), expected, rtol=1e-5)
    norm.weight.set_value(jnp.full((8,), 0.5))
    actual = norm(jnp.asarray(x), jnp.asarray(gate))
    np.testing.assert_allclose(actual, 0.5 * expected, rtol=1e-5)


def test_norms_compute_in_float32_and_return_the_activations_dtype():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 256)), jnp.bfloat16)
    exact = RMSNorm(256, eps=1e-5)(x.astype(jnp.float32))
    np.testing.assert_array_equal(RMSNorm(256, eps=1e-5)(x), exact.astype(jnp.bfloat16))
    assert RMSNorm(256, eps=1e-5, dtype=jnp.bfloat16)(exact).dtype == jnp.bfloat16
    gated = GatedRMSNorm(256, eps=1e-5)(exact, x)  # Values in float32, gate an activation.
    assert gated.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        wide = jnp.ones((1, 4), jnp.float64)
        assert RMSNorm(4, eps=1e-5)(wide).dtype == jnp.float64


def test_norm_weights_are_float32_vectors():
    for norm, start in ((RMSNorm(5, eps=1e-5), 0), (GatedRMSNorm(5, eps=1e-5), 1)):
        leaves = jax.tree.leaves(nnx.state(norm, nnx.Param))
        assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [((5,), jnp.float32)]
        np.testing.assert_array_equal(leaves[0], start)


class Maps(nnx.Module):
    """Two maps, each under a norm of its own."""

    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.norms = nnx.List([RMSNorm(16, eps=1e-5) for _ in range(2)])
        self.linears = nnx.List([nnx.Linear(16, out, dtype=dtype, rngs=rngs) for out in (8, 3)])
        vectors: list[Any] = [norm.weight for norm in self.norms]
        for vector in vectors + [linear.bias for linear in self.linears]:
            vector.set_value(0.3 * jax.random.normal(rngs.params(), vector.shape))


@pytest.mark.by_default("float32", thorough=[])
@pytest.mark.parametrize(
    ("dtype", "ratio"), [("float32", 1e-6), ("bfloat16", 2e-2)], ids=["float32", "bfloat16"]
)
def test_norms_folded_into_kernels_give_the_same_maps_and_gradients_up_to_rounding(dtype, ratio):
    x = jax.random.normal(jax.random.key(1), (2, 9, 16)).astype(dtype)
    graph, params = nnx.split(Maps(jnp.dtype(dtype)))

    def results(way):
        def apply(params, x):
            maps = nnx.merge(graph, params)
            outputs = way(x, tuple(zip(maps.norms, maps.linears, strict=True)))
            return [y.astype(jnp.float32) for y in outputs]

        @jax.jit
        def both(params, x):
            outputs, back = jax.vjp(apply, params, x)
            return outputs, back([jnp.cos(y) for y in outputs])

        return both(params, x)

    written = results(lambda x, maps: [linear(norm(x)) for norm, linear in maps])
    with compiled_for("gpu"):
        folded = results(normed_maps)
    for name, error in relative_errors(folded, written).items():
        assert error < ratio, name


@pytest.mark.slow
def test_maps_with_low_rank_updates_are_not_folded():
    maps, x = Maps(jnp.float32), jax.random.normal(jax.random.key(1), (2, 9, 16))
    low_rank = LoRALinear(maps.linears[0], LoRAConfig(maps=("x",), rank=2), rngs=nnx.Rngs(0))
    low_rank.lora_b.set_value(jnp.ones_like(low_rank.lora_b[...]))
    with compiled_for("gpu"):
        (actual,) = normed_maps(x, [(maps.norms[0], low_rank)])
    np.testing.assert_array_equal(actual, low_rank(maps.norms[0](x)))
