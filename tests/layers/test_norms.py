"""Norms against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.layers.norms import GatedRMSNorm, RMSNorm


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
